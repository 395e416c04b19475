"""The folder that `skylite prepare` writes: one parquet file per split."""

from __future__ import annotations

import os
from pathlib import Path

from skylite.data.examples import SPLITS
from skylite.data.prompts import PromptFileInfo, write_prompts
from skylite.errors import DataError, WriteFailed
from skylite.processes.file_tree import remove_tree
from skylite.run.files import fsync_path, swap_paths, temporary_sibling
from skylite.types import Prompt


def replace_folder(folder: Path, prompts: dict[str, list[Prompt]], infos: dict[str, PromptFileInfo]) -> None:
    """Replace the three files of `folder` atomically. Raises DataError, and leaves the folder as it was."""
    files = {f"{split}.parquet" for split in SPLITS}
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, not a folder.", "Choose another --out.")
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in files) if folder.is_dir() else []
    if foreign:
        raise DataError(
            f"{folder} contains other files ({', '.join(foreign[:3])}), which prepare would delete.",
            "Choose another --out.",
        )
    try:
        _write_and_swap(folder, prompts, infos)
    except (OSError, WriteFailed) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else error.what.rstrip(".")
        raise DataError(
            f"{folder} cannot be written: {reason}.", "Choose another --out or free space."
        ) from None


def _write_and_swap(folder: Path, prompts: dict[str, list[Prompt]], infos: dict[str, PromptFileInfo]) -> None:
    folder = folder.absolute()
    folder.parent.mkdir(parents=True, exist_ok=True)
    fresh = temporary_sibling(folder)
    fresh.mkdir()
    try:
        for split in SPLITS:
            write_prompts(fresh / f"{split}.parquet", prompts[split], infos[split])
        fsync_path(fresh)
        if folder.exists():
            swap_paths(fresh, folder)
        else:
            os.rename(fresh, folder)
        fsync_path(folder.parent)
    finally:
        remove_tree(fresh)
