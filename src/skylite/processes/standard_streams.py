"""Standard streams that no print fails on: closed ones, a reader that goes away, and an ASCII terminal.

This file imports only what Python has imported at its start, as import_path.py.
"""

import io
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import TextIO


class LastingStream(io.TextIOWrapper):
    """A stream whose reader may go away, as in `skylite runs | head -1`: what comes later is dropped."""

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except BrokenPipeError:
            self._drop()
            return len(text)

    def flush(self) -> None:
        try:
            super().flush()
        except BrokenPipeError:
            self._drop()

    def _drop(self) -> None:
        """Send what is still buffered, and all that follows, to /dev/null."""
        nothing = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nothing, self.fileno())
        os.close(nothing)


def protect_streams() -> None:
    """Open /dev/null in place of closed streams, and wrap the others."""
    for number in (0, 1, 2):
        try:
            os.fstat(number)
        except OSError:  # closed: the next file to be opened would take its number, and prints would go there
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # open takes the lowest free number
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = _lasting(sys.stdout, 1)
    sys.stderr = _lasting(sys.stderr, 2)


def _lasting(stream: "TextIO | None", number: int) -> "TextIO":
    if stream is None:
        return os.fdopen(number, "w", errors="backslashreplace", closefd=False)
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream  # such as a test's
    encoding, buffered = stream.encoding, stream.line_buffering
    return LastingStream(
        stream.detach(), encoding=encoding, errors="backslashreplace", line_buffering=buffered or number == 2
    )
