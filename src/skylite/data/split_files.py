"""Which files hold which split, by their names: in a hub repository, or in a folder with the hub's layout.

main/train/0000.parquet                   config main, split train   (the hub's own conversion)
main/train-00000-of-00002.parquet         config main, split train
data/train-00000-of-00001.parquet         config default
test.jsonl                                config default
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import PurePosixPath

from skylite.data.raw_rows import READABLE
from skylite.errors import ConfigError, DataError

SplitFiles = dict[str, dict[str, list[str]]]
"""Config -> split -> its files, sorted."""
DEFAULT = "default"
_SHARD = re.compile(r"(?P<split>.+?)-\d{5}-of-(?P<count>\d{5})(?:-[0-9a-f]+)?")
_SPLIT_FOLDERS = ("train", "validation", "valid", "val", "dev", "test")
_NO_DATA = re.compile(r"dataset_infos?|dataset_dict|state|package|config|.*_infos?")


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
        hint = "Choose one with --split, --validation-split or --test-split."
        if f"partial-{split}" in splits:
            hint = f"The hub converted only a part of {split}; download the files and give the folder."
        raise ConfigError(f"{where} has no split {split!r}; it has {_names(splits)}.", hint)
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
    names = sorted(value for value in values if not value.startswith("partial-"))
    return ", ".join(names[:30]) + (", ..." if len(names) > 30 else "")
