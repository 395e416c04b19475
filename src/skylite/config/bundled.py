"""The recipes and data_prep files that come with skylite. A bare name means one of these only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal


def is_bare(name: str) -> bool:
    """Whether a name means a bundled file. A name with a slash or a suffix is a path."""
    return "/" not in name and not Path(name).suffix


def bundled_folder(kind: Literal["recipes", "data_prep"]) -> Path:
    """The folder in the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_bundled" / kind
    return installed if installed.is_dir() else package.parents[1] / kind


def bundled_names(kind: Literal["recipes", "data_prep"]) -> str:
    """The names of all bundled files, for an error message."""
    return ", ".join(sorted(p.stem for p in bundled_folder(kind).glob("*.*")))
