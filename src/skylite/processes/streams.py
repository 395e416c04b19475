"""Standard streams and open files of this process.

No print fails on closed streams, on a reader that goes away or on an ASCII terminal; what a user's program
prints stays away from the terminal; and forked children keep no lock and no reaper pipe open.
"""

from __future__ import annotations

import contextlib
import io
import os
import resource
import sys
import tempfile
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from io import FileIO
from typing import TextIO

from skylite.errors import ConfigError
from skylite.untrusted_text import plain

MOST_BYTES = 1 << 20
"""The rest of what is printed in one block is dropped."""
_PRIVATE: weakref.WeakSet[FileIO] = weakref.WeakSet()


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


def _lasting(stream: TextIO | None, number: int) -> TextIO:
    if stream is None:
        return os.fdopen(number, "w", errors="backslashreplace", closefd=False)
    if not isinstance(stream, io.TextIOWrapper) or stream.fileno() != number:
        return stream  # such as a test's
    encoding, buffered = stream.encoding, stream.line_buffering
    return LastingStream(
        stream.detach(), encoding=encoding, errors="backslashreplace", line_buffering=buffered or number == 2
    )


@contextmanager
def printed_lines(keep: Callable[[str], None]) -> Iterator[None]:
    """Hand every line that is printed in the block to `keep`, made plain, when the block ends.

    A program may keep sys.stdout for later: what it prints then is dropped.
    """
    with tempfile.TemporaryFile() as file:
        copy = os.dup(file.fileno())
        stream = open(copy, "w", encoding="utf-8", errors="backslashreplace", buffering=1)  # noqa: SIM115
        try:
            with (
                _descriptors_to(file.fileno()),
                contextlib.redirect_stdout(stream),
                contextlib.redirect_stderr(stream),
            ):
                yield
        finally:
            with contextlib.suppress(OSError, ValueError):  # a full disk, or the program has closed it
                stream.flush()
            file.seek(0)
            for line in file.read(MOST_BYTES).decode("utf-8", errors="replace").splitlines():
                keep(plain(line))


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


def private_file(descriptor: int, mode: str) -> FileIO:
    """A file object that owns `descriptor`. Forked children close their copy at once; exec closes it too."""
    file = FileIO(descriptor, mode)
    _PRIVATE.add(file)
    return file


def raise_file_limit(needed: int) -> None:
    """Raise the soft limit on open files of this process and its children to `needed`, if it is lower.

    Raises ConfigError if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"The run needs {needed} open files, but ulimit -n is {hard} at most for you on this machine.",
            "Ask for a higher limit (limits.conf, or the container's --ulimit nofile), or lower "
            "engine.max_num_seqs.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _close_in_fork() -> None:
    for file in list(_PRIVATE):
        file.close()


os.register_at_fork(after_in_child=_close_in_fork)
