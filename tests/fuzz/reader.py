"""What a reader of the fuzzer is, and damage that several of them share."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.errors import SkyliteError
from tests.fuzz import damage

Damage = Callable[[Path, random.Random, str], None]


@dataclass(frozen=True, slots=True)
class Reader:
    """A kind of file."""

    prepare: Callable[[Path], None]
    """Write good files into an empty folder."""
    damage: Damage
    """Replace one of them by a damaged one."""
    read: Callable[[Path], object]
    """Everything that reads it."""
    share: float = 1.0
    """Fewer files for a slow reader."""


def document(name: str, tree: Any = None) -> Damage:
    """Damage to the JSON file `name`, whose good content is `tree`, or that of good-NAME."""

    def change(folder: Path, chosen: random.Random, kind: str) -> None:
        good = json.loads((folder / f"good-{name}").read_text()) if tree is None else tree
        (folder / name).write_bytes(damage.damaged_document(chosen, good, kind))

    return change


def lines(name: str, trees: list[Any]) -> Damage:
    """Damage to one line of a file of JSON lines."""

    def change(folder: Path, chosen: random.Random, kind: str) -> None:
        texts = [json.dumps(tree).encode() for tree in trees]
        at = chosen.randrange(len(texts))
        texts[at] = damage.damaged_document(chosen, trees[at], kind)
        (folder / name).write_bytes(b"\n".join(texts) + b"\n")

    return change


def one_of(*damages: Damage) -> Damage:
    """One of them at random."""
    return lambda folder, chosen, kind: chosen.choice(damages)(folder, chosen, kind)


def copy(folder: Path, name: str, target: str) -> None:
    """Copy a file inside the folder."""
    (folder / target).write_bytes((folder / name).read_bytes())


def prepare_nothing(folder: Path) -> None:
    """The damaged file is the only one."""


def read_all(*reads: Callable[[Path], object]) -> Callable[[Path], object]:
    """Call each, even if one refuses. Raises the first refusal at the end, any other error at once."""

    def read(folder: Path) -> None:
        refusal: SkyliteError | None = None
        for one in reads:
            try:
                one(folder)
            except SkyliteError as error:
                refusal = refusal or error
        if refusal is not None:
            raise refusal

    return read
