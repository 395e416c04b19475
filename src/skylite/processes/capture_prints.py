"""Keep what a user's program prints in this process away from the terminal."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from skylite.untrusted_text import plain

MOST_BYTES = 1 << 20
"""The rest of what is printed in one block is dropped."""


@contextmanager
def printed_lines(keep: Callable[[str], None]) -> Iterator[None]:
    """Hand every line that is printed in the block to `keep`, made plain, when the block ends.

    What libraries in C write to the descriptors comes last. A program may keep sys.stdout for later: those
    lines go to `keep` at once.
    """
    lines = _Lines(keep)
    stream = io.TextIOWrapper(io.BufferedWriter(lines), "utf-8", "backslashreplace", line_buffering=True)
    with tempfile.TemporaryFile() as file:
        try:
            with (
                _descriptors_to(file.fileno()),
                contextlib.redirect_stdout(stream),
                contextlib.redirect_stderr(stream),
            ):
                yield
        finally:
            stream.flush()
            file.seek(0)
            lines.write(file.read(MOST_BYTES))
            lines.end_block()


@contextmanager
def _descriptors_to(target: int) -> Iterator[None]:
    """Point stdout and stderr of the process to another file."""
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(AttributeError, OSError, ValueError):
            stream.flush()
    own = {number: os.dup(number) for number in (1, 2)}
    for number in own:
        os.dup2(target, number)
    try:
        yield
    finally:
        for number, descriptor in own.items():
            os.dup2(descriptor, number)
            os.close(descriptor)


class _Lines(io.RawIOBase):
    """Splits bytes into lines. `keep` may print, so it is called only when sys.stdout is its own again."""

    def __init__(self, keep: Callable[[str], None]) -> None:
        self._keep = keep
        self._waiting: bytearray | None = bytearray()
        """What the block has printed; None after it."""

    def writable(self) -> bool:
        return True

    def fileno(self) -> int:
        return 1

    def write(self, data: Any) -> int:
        """Never fails: a print must not break a program."""
        text = bytes(data)
        if self._waiting is None:
            self._send(text)
        elif len(self._waiting) < MOST_BYTES:
            self._waiting += text
        return len(text)

    def end_block(self) -> None:
        """Hand over what waited, and everything later at once."""
        text, self._waiting = bytes(self._waiting or b""), None
        self._send(text)

    def _send(self, text: bytes) -> None:
        for line in text.decode("utf-8", errors="replace").splitlines():
            self._keep(plain(line))
