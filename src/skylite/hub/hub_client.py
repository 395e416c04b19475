"""What the hub client raises, in words, and its downloads in our own progress instead of its bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Literal

from skylite.progress_reporting import LongWork
from skylite.untrusted_text import plain

Noun = Literal["model", "data set"]
BYTES_BARS = (
    "huggingface_hub.snapshot_download",
    "huggingface_hub.http_get",
    "huggingface_hub.xet_get",
)
"""Names of the bars that count bytes: of all files of a snapshot, or of one file."""
LOGIN = "`hf auth login`, or set HF_TOKEN"


class HubRefusal(Exception):
    """The hub did not give something. `remedy` is empty if only the alternatives of the caller help."""

    def __init__(self, reason: str, remedy: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.remedy = remedy


@contextmanager
def hub_refusals(name: str, noun: Noun) -> Iterator[None]:
    """Turn what the hub client raises in the block into HubRefusal."""
    from huggingface_hub.errors import HfHubHTTPError

    try:
        yield
    except Exception as error:
        # InvalidURL: the client checks addresses only when it uses them.
        known = isinstance(error, HfHubHTTPError | OSError | ValueError) or _is_a(error, "InvalidURL")
        if not known and not _is_a(error, "TransportError"):
            raise
        raise HubRefusal(*_explained(name, error, noun)) from None


def _explained(name: str, error: Exception, noun: Noun) -> tuple[str, str]:
    from huggingface_hub import constants, errors, get_token

    page = f"{constants.ENDPOINT}/{'datasets/' if noun == 'data set' else ''}{name}"
    cause = _cause(error)
    if isinstance(cause, errors.GatedRepoError):
        if get_token() is None:
            return (
                "it is gated, and you are not logged in.",
                f"Accept its licence on {page}, then log in with {LOGIN}.",
            )
        return (
            "it is gated, and your token has no access to it.",
            f"Accept its licence on {page} with the account of your token, or use another token: {LOGIN}.",
        )
    if isinstance(cause, errors.RevisionNotFoundError):
        return f"the {noun} has no such revision.", ""
    if isinstance(cause, errors.RepositoryNotFoundError):
        return f"the hub has no public {noun} of that name.", f"Check the name. If it is private: {LOGIN}."
    if isinstance(cause, errors.OfflineModeIsEnabled):
        return f"HF_HUB_OFFLINE is set, and the local cache has no complete copy of the {noun}.", ""
    status = getattr(getattr(cause, "response", None), "status_code", None)
    if status == 401:
        return "the hub does not accept your token.", f"Log in again with {LOGIN}."
    if status is not None:
        return f"{constants.ENDPOINT} answered {status}, and the local cache has no complete copy.", ""
    if isinstance(error, errors.LocalEntryNotFoundError) or _is_a(cause, "TransportError"):
        return (
            f"{constants.ENDPOINT} cannot be reached ({type(cause).__name__}), and the local cache has no "
            f"complete copy of the {noun}.",
            "",
        )
    return _first_line(cause), ""


def _cause(error: Exception) -> BaseException:
    """The error behind huggingface_hub's "not in the cache" error."""
    from huggingface_hub.errors import LocalEntryNotFoundError

    found: BaseException = error
    while isinstance(found, LocalEntryNotFoundError) and found.__cause__ is not None:
        found = found.__cause__
    return found


def _is_a(error: BaseException, name: str) -> bool:
    """Whether it is this error of httpx, or of httpx2, which huggingface_hub uses since 2.0."""
    return any(kind.__name__ == name for kind in type(error).__mro__)


def _first_line(error: BaseException) -> str:
    text = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
    return f"{plain(text).rstrip('.')}."


def download_bar(work: LongWork) -> type[Any]:
    """A `tqdm_class` for snapshot_download and hf_hub_download that draws nothing and advances `work`."""
    from huggingface_hub.utils import tqdm  # type: ignore[attr-defined]

    class Bar(tqdm):  # type: ignore[misc, unused-ignore]
        def __init__(self, *args: Any, **settings: Any) -> None:
            self._counts = settings.get("name") in BYTES_BARS
            super().__init__(*args, **{**settings, "disable": True})  # type: ignore[no-untyped-call]
            if self._counts:
                work.total = int(self.total or 0)
                work.advance(int(settings.get("initial") or 0))  # an earlier download left these bytes

        def refresh(self, *_: Any, **__: Any) -> None:
            """Called when another file adds its size to the total."""
            if self._counts:
                work.total = int(self.total)

        def update(self, n: float | None = 1) -> None:
            if self._counts:
                work.advance(int(n or 0))

    return Bar


@contextmanager
def without_hub_bars() -> Iterator[None]:
    """Hide the bars of calls that take no `tqdm_class`: they know nothing of --quiet."""
    from huggingface_hub.utils.tqdm import (
        are_progress_bars_disabled,
        disable_progress_bars,
        enable_progress_bars,
    )

    were_shown = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if were_shown:
            enable_progress_bars()
