"""What episodes print, in the log of the process that runs them.

Each episode prints into a pipe of its own, so that neither a large log, nor a full disk, nor another episode
can end it. The log keeps the newest output: at LOG_BYTES it becomes episodes.log.1, which replaces an older
one.
"""

from __future__ import annotations

import contextlib
import os
import stat
from dataclasses import dataclass

LOG_BYTES = 256 << 20
"""Largest log. An older one of that size stays beside it."""
LINE_BYTES = 1 << 16
"""A longer line is written in parts, between which other episodes may print."""
CHUNK_BYTES = 1 << 16
CHUNKS = 16
"""Read at once at most: one episode that prints without end must not keep the host from the others."""


@dataclass(slots=True)
class Printed:
    """The read end of one episode's pipe."""

    pipe: int
    _line: bytes = b""

    def read(self) -> bool:
        """Write to the log what has been printed. Returns whether more may come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS):
                if not (chunk := os.read(self.pipe, CHUNK_BYTES)):
                    return False
                complete, end, rest = (self._line + chunk).rpartition(b"\n")
                if not end and len(rest) < LINE_BYTES:
                    self._line = rest
                    continue
                self._line = rest if end else b""
                append_to_log(complete + end if end else rest)
        return True

    def finish(self) -> None:
        """Write the rest to the log and close the pipe."""
        self.read()
        if self._line:
            append_to_log(self._line + b"\n")
        os.close(self.pipe)


def print_into_pipe() -> tuple[Printed, int]:
    """A pipe for an episode, and its write end."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return Printed(read_end), write_end


def append_to_log(data: bytes) -> None:
    """Append to this process's stdout. What the disk does not take is lost: no print may end an episode."""
    with contextlib.suppress(OSError):
        info = os.fstat(1)
        if stat.S_ISREG(info.st_mode) and info.st_size + len(data) > LOG_BYTES:
            _start_new_log()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def _start_new_log() -> None:
    path = os.readlink("/proc/self/fd/1")
    os.replace(path, f"{path}.1")
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)
