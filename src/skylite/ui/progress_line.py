"""Shows long work: one line that is redrawn on a terminal, plain lines in a log."""

from __future__ import annotations

import logging
import shutil
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager

from skylite.progress_reporting import LongWork
from skylite.ui.logs import ON_PANEL, has_screen, lines_on_screen, show_on_panel, shows_info
from skylite.untrusted_text import plain

logger = logging.getLogger(__name__)
REDRAW_S = 0.5
FIRST_LINE_S = 5.0
LINE_S, LONGEST_LINE_S = 15.0, 300.0
"""Between two lines in a log, after the first: twice as long each time."""
_CLEAR = "\r\x1b[K"


@contextmanager
def show_progress(work: LongWork) -> Iterator[None]:
    """Show the progress of a block. --quiet hides it; a run's log file gets its lines in any case."""
    finished, is_live = threading.Event(), not has_screen() and sys.stderr.isatty() and shows_info()
    with ExitStack() as stack:
        if is_live:
            stack.enter_context(lines_on_screen(_print_above, has_panel=True))
            stack.callback(_write, _CLEAR)
        draw = _draw_line if is_live else show_on_panel
        stack.callback(show_on_panel, "")
        threads = [
            threading.Thread(target=_log_lines, args=(finished, work), daemon=True),
            threading.Thread(target=_redraw, args=(finished, work, draw), daemon=True),
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            finished.set()
            for thread in threads:
                thread.join()


def _log_lines(finished: threading.Event, work: LongWork) -> None:
    """Log a line now and then. A live terminal does not print them: it shows the redrawn line."""
    wait_s, next_s = FIRST_LINE_S, LINE_S
    while not finished.wait(wait_s):
        logger.info(work.text(), extra=ON_PANEL)
        wait_s, next_s = next_s, min(2 * next_s, LONGEST_LINE_S)


def _redraw(finished: threading.Event, work: LongWork, draw: Callable[[str], None]) -> None:
    while not finished.wait(REDRAW_S):
        draw(plain(work.text()))


def _draw_line(text: str) -> None:
    width = shutil.get_terminal_size().columns - 1  # a line that wraps could not be redrawn
    _write(_CLEAR + text[:width])


def _print_above(text: str) -> None:
    _write(f"{_CLEAR}{text}\n")


def _write(text: str) -> None:
    sys.stderr.write(text)
    sys.stderr.flush()
