"""Notes: what skylite chose, substituted or warns of. Printed at the start and recorded in config.json."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Note:
    """One sentence for the user."""

    text: str
    level: Literal["info", "warning"] = "info"

    def __str__(self) -> str:
        return f"warning: {self.text}" if self.is_warning else self.text

    @property
    def is_warning(self) -> bool:
        return self.level == "warning"


def warning(text: str) -> Note:
    """A note that the user should act on."""
    return Note(text, "warning")


def notes_of(*notes: Note | str | None) -> list[Note]:
    """The notes without absent and empty ones. Plain text is information."""
    return [note if isinstance(note, Note) else Note(note) for note in notes if note]


def log_notes(notes: Iterable[Note]) -> None:
    """Log each note at its level."""
    for note in notes:
        logger.log(logging.WARNING if note.is_warning else logging.INFO, note.text)
