"""Work that may take longer than a few seconds, and how far it is. Any layer reports with it.

The command line shows it (ui/progress_line.py). In a program that imports skylite, nothing shows it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

ENOUGH_PARTS = 10
"""Parts, or half of them if there are fewer, from which the time left is estimated."""


class LongWork:
    """How far some work is. Any thread may change it."""

    def __init__(
        self,
        what: str,
        total: int | None = None,
        expected_s: float | None = None,
        *,
        in_bytes: bool = False,
        detail: Callable[[], str] = lambda: "",
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """
        Args:
            what: such as "evaluating".
            total: number of parts; None: unknown.
            in_bytes: the parts are bytes.
            expected_s: seconds that it took before, if the parts are unknown.
            detail: returns what it does now, or nothing.
        """
        self.what, self.total, self.expected_s = what, total, expected_s
        self.in_bytes = in_bytes
        self.done = 0
        self.detail = detail
        self._clock, self._started = clock, clock()
        self._lock = threading.Lock()

    @property
    def elapsed_s(self) -> float:
        return self._clock() - self._started

    def advance(self, count: int = 1) -> None:
        """`count` more parts of `total` are done."""
        with self._lock:
            self.done += count

    def text(self) -> str:
        """Such as `evaluating: 120 of 512 (23 %), 40 s, about 2 min 10 s left`."""
        parts = list(filter(None, [self.detail()]))
        if self.total:
            done, total = (f"{n / 1e6:.0f} MB" if self.in_bytes else str(n) for n in (self.done, self.total))
            parts.append(f"{done} of {total} ({100 * self.done // self.total} %)")
        parts.append(duration(self.elapsed_s))
        left = self.seconds_left()
        return f"{self.what}: {', '.join(parts)}" + (f", about {duration(left)} left" if left else "")

    def seconds_left(self) -> float | None:
        """Estimate from the parts done so far, or from the time it took before. None: unknown.

        Parts run at the same time, and the first ones to end are the short ones: a few say nothing.
        """
        if self.total and self.done >= min(ENOUGH_PARTS, (self.total + 1) // 2):
            return self.elapsed_s / self.done * (self.total - self.done)
        if self.expected_s is not None and self.expected_s > self.elapsed_s:
            return self.expected_s - self.elapsed_s
        return None


Show = Callable[[LongWork], AbstractContextManager[None]]


class _Shown:
    show: Show = staticmethod(lambda _: nullcontext())


def show_long_work(show: Show) -> None:
    """Show every `long_work` block with this context manager from now on."""
    _Shown.show = staticmethod(show)


@contextmanager
def long_work(
    what: str,
    total: int | None = None,
    expected_s: float | None = None,
    *,
    in_bytes: bool = False,
    detail: Callable[[], str] = lambda: "",
) -> Iterator[LongWork]:
    """Show how far a block is, if it takes longer than a few seconds."""
    work = LongWork(what, total, expected_s, in_bytes=in_bytes, detail=detail)
    with _Shown.show(work):
        yield work


def duration(seconds: float) -> str:
    """Such as `40 s`, `2 min 10 s` or `3 h 5 min`."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
