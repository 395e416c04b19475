"""How long some work took before on this machine, to estimate its end. A lost file loses estimates only."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skylite.errors import WriteFailed
from skylite.processes.private_folders import state_folder
from skylite.progress_reporting import LongWork, long_work
from skylite.run.files import write_json
from skylite.untrusted_text import parse_json

MAX_KEYS = 200


def remembered_s(key: str) -> float | None:
    """Seconds that this work took the last time; None: unknown."""
    seconds = _read().get(key)
    return seconds if isinstance(seconds, float) and seconds > 0 else None


@contextmanager
def remembered_work(
    what: str, key: str, size: float = 1.0, *, detail: Callable[[], str] = lambda: ""
) -> Iterator[LongWork]:
    """Show long work with the time left that the last time tells, and remember how long it takes.

    `size`: how much there is to do, such as bytes; the time is taken to grow with it.
    """
    known = remembered_s(key)
    expected_s = None if known is None else known * size
    with long_work(what, expected_s=expected_s, detail=detail) as work:
        yield work
    remember_s(key, work.elapsed_s / size)


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
