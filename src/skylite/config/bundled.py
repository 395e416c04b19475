"""The recipes and data_prep files that come with skylite. A bare name means one of these only."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from skylite.errors import SkyliteError

Kind = Literal["recipes", "data_prep"]


def is_bare(name: str) -> bool:
    """Whether a name means a bundled file. A name with a slash or a suffix is a path."""
    return "/" not in name and not Path(name).suffix


def bundled_folder(kind: Kind) -> Path:
    """The folder in the installed package, or in the checkout."""
    package = Path(__file__).resolve().parents[1]
    installed = package / "_bundled" / kind
    return installed if installed.is_dir() else package.parents[1] / kind


def bundled_names(kind: Kind) -> str:
    """The names of all bundled files, for an error message."""
    return ", ".join(sorted(p.stem for p in bundled_folder(kind).glob("*.*")))


def find_file(name: str, kind: Kind, nouns: tuple[str, str], known: str, error: type[SkyliteError]) -> Path:
    """The file for a bare name, which is a bundled one, or for a path.

    Args:
        nouns: what a bare name and a path are called in messages, such as "recipe" and "recipe file".
        known: a sentence with the names that exist.
        error: raised if there is no such file.
    """
    bare, path = nouns
    if not is_bare(name):
        if not Path(name).is_file():
            raise error(
                f"The {path} {name} does not exist; a name with a slash or a suffix is a path.", known
            )
        return Path(name)
    suffix = ".toml" if kind == "recipes" else ".py"
    found = bundled_folder(kind) / f"{name}{suffix}"
    if not found.is_file():
        raise error(
            f"There is no bundled {bare} {name!r} in {found.parent}; "
            "a name without slash and suffix means one.",
            f"{known} For a file of yours give its path, such as ./{name}{suffix}.",
        )
    return found
