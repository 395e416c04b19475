"""Data sets of the Hugging Face hub, or of its local cache when the hub cannot be reached."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from skylite.data.raw_rows import Table, read_table
from skylite.errors import DataError
from skylite.hub.hub_client import HubRefusal, download_bar, hub_refusals
from skylite.processes.file_tree import files_below
from skylite.progress_reporting import long_work

TIMEOUT_S = 10.0
CONVERTED = "refs/convert/parquet"
"""The branch with the hub's own conversion to parquet files, CONFIG/SPLIT/0000.parquet."""
BRANCHES = (CONVERTED, "main")


class HubError(DataError):
    """The hub did not respond, or does not have the file."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HubRepository:
    """One commit of a data set on the hub."""

    name: str
    branch: str
    commit: str
    files: list[str]
    cache: Path | None = None
    """The commit in the local cache, if the hub did not give it."""

    def read(self, file: str) -> Table:
        """The rows of a file, which is downloaded if necessary. Raises DataError."""
        path = self.cache / file if self.cache else _download(self.name, file, self.branch)
        # Downloaded by the branch, not by the commit: the cache finds only branches without a network.
        if self.commit not in path.parts:
            raise HubError(
                f"The data set {self.name} changed on the hub during the download.", "Start again."
            )
        return named_table(path, f"{self.name}/{file}")

    @property
    def note(self) -> str:
        """Where the files come from, for the user."""
        place = "the hub's local cache, because the hub did not give it" if self.cache else "the hub"
        return f"{place}: {self.name}, branch {self.branch}, commit {self.commit[:12]}"


def hub_table(repository: str, file: str) -> Table:
    """A file of a hub data set, from the local hub cache if possible. Raises HubError in seconds."""
    from huggingface_hub import try_to_load_from_cache

    cached = try_to_load_from_cache(repository, file, repo_type="dataset")
    if not isinstance(cached, str):
        cached = str(_download(repository, file, "main"))
    return named_table(Path(cached), f"{repository}/{file}")


def named_table(path: Path, name: str) -> Table:
    """The rows of a downloaded file; messages name the file on the hub. Raises DataError."""
    table = read_table(path, "hub")
    rows = [replace(row, where=row.where.replace(str(path), name, 1)) for row in table.rows]
    return replace(table, rows=rows, source=name)


def find_repository(name: str) -> HubRepository:
    """The newest commit of a data set on the hub, else the commit in the local cache. Raises HubError."""
    try:
        with _hub_errors(name):
            return _listed(name)
    except HubError as refused:
        cached = _cached(name)
        if cached is None:
            hint = "Give a local file or folder, or a data set that is in the cache."
            raise HubError(
                f"{name} is no file or folder here. {refused.what}", refused.hint or hint
            ) from None
        return cached


@contextmanager
def _hub_errors(name: str) -> Iterator[None]:
    """Turn what the hub client raises in the block into HubError, after a quick look if the hub answers."""
    try:
        with hub_refusals(name, "data set"):
            _check_hub(name)
            yield
    except HubRefusal as refusal:
        raise HubError(f"The data set {name!r} cannot be read: {refusal.reason}", refusal.remedy) from None


def _listed(name: str) -> HubRepository:
    from huggingface_hub import HfApi
    from huggingface_hub.errors import RevisionNotFoundError

    for branch in BRANCHES:
        try:
            info = HfApi().dataset_info(name, revision=branch, timeout=TIMEOUT_S)
        except RevisionNotFoundError:
            continue
        files = [sibling.rfilename for sibling in info.siblings or []]
        if branch == CONVERTED and not any(file.endswith(".parquet") for file in files):
            continue
        return HubRepository(name=name, branch=branch, commit=str(info.sha), files=files)
    raise HubError(f"The data set {name!r} has no branch main.", "Check the name.")


def _cached(name: str) -> HubRepository | None:
    """The data set in the local cache, with the files that were downloaded."""
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HFValidationError, LocalEntryNotFoundError

    for branch in BRANCHES:
        try:
            folder = Path(
                snapshot_download(name, repo_type="dataset", revision=branch, local_files_only=True)
            )
        except (LocalEntryNotFoundError, HFValidationError, OSError):
            continue
        files = files_below(folder)
        return HubRepository(name=name, branch=branch, commit=folder.name, files=files, cache=folder)
    return None


def _download(repository: str, file: str, revision: str) -> Path:
    from huggingface_hub import hf_hub_download

    what = f"downloading {repository}/{file}"
    with _hub_errors(repository), long_work(what, in_bytes=True) as work:
        return Path(
            hf_hub_download(
                repository,
                file,
                repo_type="dataset",
                revision=revision,
                etag_timeout=TIMEOUT_S,
                tqdm_class=download_bar(work),
            )
        )


def _check_hub(repository: str) -> None:
    """One quick request first: without a network the hub client retries for half a minute."""
    import httpx
    from huggingface_hub import constants
    from huggingface_hub.errors import OfflineModeIsEnabled

    if constants.HF_HUB_OFFLINE:
        raise OfflineModeIsEnabled(repository)
    httpx.head(f"{constants.ENDPOINT}/datasets/{repository}", timeout=TIMEOUT_S)
