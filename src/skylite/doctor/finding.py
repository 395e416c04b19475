"""What a check found."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Level = Literal["ok", "note", "bad"]


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of `skylite doctor`."""

    check: str
    """What was checked, such as "disk"."""
    level: Level
    """bad: a run fails, or may fail. note: worth knowing."""
    text: str
    fix: str = ""
    """The command that fixes it, or the step to take where no command can. Empty only for ok."""


def ok(check: str, text: str) -> Finding:
    return Finding(check, "ok", text)


def note(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "note", text, fix)


def bad(check: str, text: str, fix: str) -> Finding:
    return Finding(check, "bad", text, fix)
