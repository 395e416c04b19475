"""Progress with time left: one line that is redrawn on a terminal, plain lines in a log."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from skylite.ui.logs import lines_on_screen, shows_info

logger = logging.getLogger(__name__)
REDRAW_S = 0.5
LINE_S = 10.0
"""Between two lines in a log. Work that takes less prints none."""
_CLEAR = "\r\x1b[K"


class ProgressLine:
    """How far some work is. Any thread may call `advance`."""

    def __init__(self, what: str, total: int | None, clock: Callable[[], float] = time.monotonic) -> None:
        self.what, self.total, self.done = what, total, 0
        self._clock, self._started = clock, clock()
        self._lock = threading.Lock()

    def advance(self, count: int = 1) -> None:
        """`count` more parts of `total` are done."""
        with self._lock:
            self.done += count

    def text(self) -> str:
        """Such as `evaluating: 120 of 512 (23 %), 40 s, about 2 min 10 s left`."""
        elapsed = self._clock() - self._started
        if self.total is None:
            return f"{self.what}: {duration(elapsed)}"
        text = f"{self.what}: {self.done} of {self.total} ({100 * self.done // max(1, self.total)} %)"
        if not self.done:
            return f"{text}, {duration(elapsed)}"
        left = elapsed / self.done * (self.total - self.done)
        return f"{text}, {duration(elapsed)}, about {duration(left)} left"


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[ProgressLine]:
    """Show the progress of a block. `total` None: the time only. --quiet hides it."""
    line, finished = ProgressLine(what, total), threading.Event()
    with ExitStack() as stack:
        show: Callable[[str], None] = logger.info
        if is_live := sys.stderr.isatty():
            stack.enter_context(lines_on_screen(_print_above, has_panel=False))
            show = _redraw
        every_s = REDRAW_S if is_live else LINE_S
        thread = threading.Thread(target=_repeat, args=(finished, every_s, line, show), daemon=True)
        if shows_info():
            thread.start()
        try:
            yield line
        finally:
            finished.set()
            if thread.ident is not None:
                thread.join()
            if is_live and shows_info():
                sys.stderr.write(_CLEAR)
                sys.stderr.flush()


def duration(seconds: float) -> str:
    """Such as `40 s`, `2 min 10 s` or `3 h 5 min`."""
    whole = round(seconds)
    hours, minutes, rest = whole // 3600, whole // 60 % 60, whole % 60
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"


def _repeat(
    finished: threading.Event, every_s: float, line: ProgressLine, show: Callable[[str], None]
) -> None:
    while not finished.wait(every_s):
        show(line.text())


def _redraw(text: str) -> None:
    sys.stderr.write(_CLEAR + text)
    sys.stderr.flush()


def _print_above(text: str) -> None:
    sys.stderr.write(f"{_CLEAR}{text}\n")
    sys.stderr.flush()
