"""The rows of a user's data: a file, a folder with the hub's layout, or a data set on the hub."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from skylite.config.bundled import is_bare
from skylite.data.hub import find_repository
from skylite.data.prompts import SPLITS, Split
from skylite.data.raw_rows import READABLE, Table, join_tables, read_table
from skylite.data.split_files import SplitFiles, choose_files, find_splits, split_names
from skylite.errors import ConfigError, DataError
from skylite.processes.file_tree import files_below

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")


PACKED = (".gz", ".bz2", ".xz", ".zst", ".zip")
"""Suffixes of packed files."""


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnSource:
    """Where the rows are."""

    target: str
    """A file, a folder or a hub id."""
    config: str | None = None
    """Config of a hub data set or folder."""
    train: str | None = None
    """Split with the training rows. None: train."""
    validation: str | None = None
    """Split for validation. None: rows held out of `train`."""
    test: str | None = None

    @property
    def name(self) -> str:
        """Name of the data set: the start of every prompt's id, and the default output folder."""
        path = Path(self.target)
        return path.stem if self.is_file else path.resolve().name

    @property
    def is_file(self) -> bool:
        """Whether the target names a single file."""
        return self.target.endswith(READABLE) and not Path(self.target).is_dir()


@dataclass(frozen=True, slots=True)
class OwnTables:
    """The tables that were read."""

    splits: dict[Split, Table]
    """train, and those of validation and test that have a split of their own."""
    notes: list[str]


def is_own_data(target: str) -> bool:
    """Whether a target of `skylite prepare` is a file with rows, a folder, or a hub id."""
    if target.endswith((*READABLE, *PACKED)):
        return True
    if is_bare(target) or target.endswith(".py"):
        return False
    return Path(target).is_dir() or (not Path(target).exists() and bool(_HUB_ID.fullmatch(target)))


def read_own_tables(source: OwnSource) -> OwnTables:
    """Read the splits. Raises DataError and ConfigError."""
    if source.target.endswith(PACKED):
        raise DataError(*packed_text(Path(source.target)))
    if source.is_file:
        _refuse_split_flags(source)
        return OwnTables({"train": read_table(Path(source.target))}, [f"source: {source.target}"])
    if Path(source.target).is_dir():
        return _read_folder(source, Path(source.target))
    repository = find_repository(source.target)
    found = find_splits(repository.files)
    tables = _read_splits(source, found, repository.read)
    return OwnTables(tables, [f"source: {repository.note}", _splits_note(source, found)])


def _read_folder(source: OwnSource, folder: Path) -> OwnTables:
    files = files_below(folder)
    found = find_splits(files)
    if not found:
        refuse_unreadable(folder, files)
    tables = _read_splits(source, found, lambda file: read_table(folder / file, "folder"))
    return OwnTables(tables, [f"source: folder {folder}", _splits_note(source, found)])


def refuse_unreadable(folder: Path, files: Sequence[str]) -> None:
    """Raise DataError with the remedy for files that hold data in another form."""
    if any(file.endswith(".arrow") for file in files):
        path = str(folder)
        raise DataError(
            f"{folder} was written by save_to_disk of the library datasets, which skylite does not read.",
            f"Write its splits as parquet: datasets.load_from_disk({path!r}), then to_parquet of each split.",
        )
    if packed := next((file for file in files if file.endswith(PACKED)), None):
        raise DataError(*packed_text(folder / packed))


def packed_text(path: Path) -> tuple[str, str]:
    """What is wrong with a packed file, and the remedy."""
    command = {".gz": "gunzip", ".bz2": "bunzip2", ".xz": "unxz", ".zst": "unzstd", ".zip": "unzip"}[
        path.suffix
    ]
    return (
        f"{path} is packed, and skylite reads {', '.join(READABLE)} files.",
        f"Unpack it: {command} {shlex.quote(str(path))}",
    )


def _read_splits(source: OwnSource, found: SplitFiles, read: Callable[[str], Table]) -> dict[Split, Table]:
    wanted = dict(zip(SPLITS, (source.train or "train", source.validation, source.test), strict=True))
    files: dict[Split, Sequence[str]] = {
        split: choose_files(found, source.config, name, source.target)
        for split, name in wanted.items()
        if name is not None
    }
    used = [file for names in files.values() for file in names]
    if twice := next((file for file in used if used.count(file) > 1), None):
        raise ConfigError(
            f"{source.target}: {twice} was chosen for two splits, which would share their rows.",
            "Choose different splits.",
        )
    tables = {split: [read(file) for file in names] for split, names in files.items()}
    joined = {split: join_tables(parts, _described(source, files[split])) for split, parts in tables.items()}
    for split, table in joined.items():
        if not table.rows:
            raise DataError(f"{source.target} has no rows in its split {wanted[split]!r}.")
    return joined


def _described(source: OwnSource, files: Sequence[str]) -> str:
    more = f" and {len(files) - 1} more" if len(files) > 1 else ""
    return f"{source.target}: {files[0]}{more}"


def _splits_note(source: OwnSource, found: SplitFiles) -> str:
    chosen = [name for name in (source.train or "train", source.validation, source.test) if name]
    config = f" of config {source.config}" if source.config else ""
    return f"splits{config}: {', '.join(chosen)} of {', '.join(split_names(found, source.config))}"


def _refuse_split_flags(source: OwnSource) -> None:
    flags = {
        "--config": source.config,
        "--split": source.train,
        "--validation-split": source.validation,
        "--test-split": source.test,
    }
    given = [name for name, value in flags.items() if value is not None]
    if given:
        raise ConfigError(
            f"{' and '.join(given)} cannot be used with the single file {source.target}.",
            "Give a folder or a hub id, or remove the flag.",
        )


def filter_rows(table: Table, conditions: Sequence[str]) -> Table:
    """The rows that fit every COLUMN=VALUE,VALUE. Raises ConfigError for a condition that no row fits."""
    for condition in conditions:
        column, equals, wanted = condition.partition("=")
        if not equals or not column or not wanted:
            raise ConfigError(f"--where {condition} is not COLUMN=VALUE or COLUMN=VALUE,VALUE.")
        values = [str(row.value(column)) for row in table.rows]
        allowed = set(wanted.split(",")) | {wanted}
        rows = [row for row, value in zip(table.rows, values, strict=True) if value in allowed]
        if not rows:
            have = sorted(set(values))
            shown = ", ".join(value[:40] for value in have[:20]) + (", ..." if len(have) > 20 else "")
            raise ConfigError(
                f"--where {condition} fits no row of {table.source}; {column} has the values {shown}.",
                "Choose some of them.",
            )
        table = replace(table, rows=rows)
    return table
