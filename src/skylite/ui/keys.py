"""Single keys from the terminal, without Enter."""

from __future__ import annotations

import os
import select
import sys
import termios
import tty
from collections.abc import Iterator
from contextlib import contextmanager

ARROWS = {"A": "up", "B": "down", "C": "right", "D": "left"}
ESCAPE_WAIT_S = 0.05
"""The rest of an arrow's escape sequence arrives within this time."""


class Keys:
    """Reads keys from a terminal in cbreak mode."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor = descriptor

    def read(self, timeout_s: float) -> str:
        """A character, an arrow's name, or "" if no key came in time. "q" at the end of the input."""
        if not self._waits(timeout_s):
            return ""
        key = os.read(self._descriptor, 1).decode("utf-8", errors="replace")
        if key != "\x1b":
            return key or "q"
        if not self._waits(ESCAPE_WAIT_S) or os.read(self._descriptor, 1) not in (b"[", b"O"):
            return ""
        return ARROWS.get(os.read(self._descriptor, 1).decode("ascii", errors="replace"), "")

    def _waits(self, timeout_s: float) -> bool:
        return bool(select.select([self._descriptor], [], [], timeout_s)[0])


@contextmanager
def terminal_keys() -> Iterator[Keys | None]:
    """The keys of stdin; None if it is no terminal. Restores the terminal at the end."""
    if not sys.stdin.isatty():
        yield None
        return
    descriptor = sys.stdin.fileno()
    before = termios.tcgetattr(descriptor)
    try:
        tty.setcbreak(descriptor)
        yield Keys(descriptor)
    finally:
        termios.tcsetattr(descriptor, termios.TCSADRAIN, before)
