"""The files of a model folder. A stranger's folder may hold links to files of yours, such as a private key.

They would become part of an export, which may be pushed, and the tokenizer's sandbox could read them.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

from skylite.errors import ModelError

SUBFOLDERS = ("additional_chat_templates",)


def model_files(folder: Path, patterns: Sequence[str] = ("*",)) -> list[Path]:
    """The files of a model folder that match a pattern, sorted. Raises ModelError for a link out of it.

    A snapshot in the hub's cache consists of links into `blobs` of the same repository, and may.
    """
    for place in (folder, *(folder / name for name in SUBFOLDERS if (folder / name).is_dir())):
        for path in place.iterdir():
            _require_inside(path, folder)
    return sorted({file for pattern in patterns for file in folder.glob(pattern) if file.is_file()})


def _require_inside(path: Path, folder: Path) -> None:
    root, target = os.path.realpath(folder), os.path.realpath(path)
    inside = [root, *([str(Path(root).parents[1])] if Path(root).parent.name == "snapshots" else [])]
    if not any(Path(target).is_relative_to(place) for place in inside):
        raise ModelError(
            f"{path} is a link out of the model folder, to {target}; an export would copy that file.",
            "Replace the link by the file, if it is part of the model.",
        )
