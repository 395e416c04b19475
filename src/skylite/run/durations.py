"""How long some work took before on this machine, to estimate its end. A lost file loses estimates only."""

from __future__ import annotations

from contextlib import suppress
from pathlib import Path

from skylite.errors import WriteFailed
from skylite.foreign_text import parse_json
from skylite.run.files import write_json
from skylite.run.programs_named_by_user import state_folder

MAX_KEYS = 200


def remembered_s(key: str) -> float | None:
    """Seconds that this work took the last time; None: unknown."""
    seconds = _read().get(key)
    return seconds if isinstance(seconds, float) and seconds > 0 else None


def remember_s(key: str, seconds: float) -> None:
    """Remember how long this work took."""
    known = {**{k: v for k, v in _read().items() if k != key}, key: float(seconds)}
    with suppress(WriteFailed):
        write_json(_path(), dict(list(known.items())[-MAX_KEYS:]))


def _path() -> Path:
    return state_folder() / "durations.json"


def _read() -> dict[str, object]:
    try:
        known = parse_json(_path().read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return known if isinstance(known, dict) else {}
