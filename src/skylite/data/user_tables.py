"""The rows of a user's data: a file, a folder with the hub's layout, or a data set on the hub.

The names of files say their config and split:

    main/train/0000.parquet                   config main, split train   (the hub's own conversion)
    main/train-00000-of-00002.parquet         config main, split train
    data/train-00000-of-00001.parquet         config default
    test.jsonl                                config default
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from skylite.config.bundled import is_bare
from skylite.data.hub import find_repository
from skylite.data.prompts import SPLITS, Split
from skylite.data.raw_rows import READABLE, Table, join_tables, read_table
from skylite.errors import ConfigError, DataError
from skylite.processes.file_tree import files_below

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
SplitFiles = dict[str, dict[str, list[str]]]
"""Config -> split -> its files, sorted."""
DEFAULT = "default"
_SHARD = re.compile(r"(?P<split>.+?)-\d{5}-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")
_SPLIT_FOLDERS = ("train", "validation", "valid", "val", "dev", "test")
_NO_DATA = re.compile(r"dataset_infos?|dataset_dict|state|package|config|.*_infos?")
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


def find_splits(files: Iterable[str]) -> SplitFiles:
    """Sort the data files of a listing by config and split. Other files are left out."""
    found: SplitFiles = {}
    for file in sorted(files):
        path = PurePosixPath(file)
        if path.suffix not in READABLE or any(part.startswith(".") for part in path.parts):
            continue
        if path.suffix == ".json" and _NO_DATA.fullmatch(path.stem):
            continue
        *folders, split = [*path.parts[:-1], _split_name(path.stem)]
        if folders and (path.stem.isdigit() or folders[-1] in _SPLIT_FOLDERS):
            split = folders.pop()
        config = "/".join(part for part in folders if part != "data") or DEFAULT
        found.setdefault(config, {}).setdefault(split, []).append(file)
    return found


def choose_files(found: SplitFiles, config: str | None, split: str, where: str) -> list[str]:
    """The files of a split. Raises ConfigError for an unknown name, DataError for an incomplete split.

    `config`: None for the only one, or for the one named default. `where`: the data set in messages.
    """
    if not found:
        raise DataError(
            f"{where} has no {', '.join(READABLE)} file.", "Give a file, or a data set with such files."
        )
    if config is None and len(found) > 1 and DEFAULT not in found:
        raise ConfigError(f"{where} has several configs: {_names(found)}.", "Choose one with --config.")
    chosen = config or (DEFAULT if DEFAULT in found else next(iter(found)))
    if chosen not in found:
        raise ConfigError(
            f"{where} has no config {chosen!r}; it has {_names(found)}.", "Choose one of them with --config."
        )
    splits = found[chosen]
    if split not in splits:
        raise ConfigError(
            f"{where} has no split {split!r}; it has {_names(splits)}.",
            "Choose one with --split, --validation-split or --test-split.",
        )
    _check_complete(splits[split], split, where)
    return splits[split]


def split_names(found: SplitFiles, config: str | None) -> list[str]:
    """The splits of a config that `choose_files` accepts."""
    return sorted(found[config or (DEFAULT if DEFAULT in found else next(iter(found)))])


def _split_name(stem: str) -> str:
    shard = _SHARD.fullmatch(stem)
    return shard["split"] if shard else stem


def _check_complete(files: list[str], split: str, where: str) -> None:
    shards = [_SHARD.fullmatch(PurePosixPath(file).stem) for file in files]
    counts = {int(shard["count"]) if shard else 1 for shard in shards}
    formats = {PurePosixPath(file).suffix for file in files}
    if len(formats) > 1 or (len(counts) > 1):
        raise DataError(
            f"{where} has more than one set of files for the split {split!r}: {', '.join(files[:4])}.",
            "Give one of the files.",
        )
    if all(shards) and counts != {len(files)}:
        raise DataError(
            f"{where} has {len(files)} of the {counts.pop()} files of the split {split!r}.",
            "Download the other files too.",
        )


def _names(values: Iterable[str]) -> str:
    names = sorted(values)
    return ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")


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
