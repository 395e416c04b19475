"""What an episode has left behind when it returns: descriptors that it did not close, living processes.

Runs in the episode's own process, which ends right after it.
"""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import stat
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

from pydantic import BaseModel, ConfigDict

from skylite.processes.reaper import children

MAX_NAMES = 20
"""Most files and most processes that are named."""
MAX_CHARACTERS = 200
"""Longest name."""
_FLAGS, _PF_EXITING = 6, 0x4
"""Where /proc/PID/stat has the flags, counted from the state, and the flag of a process that ends."""


class Leftovers(BaseModel):
    """Names of the first of each kind, for people."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    files: tuple[str, ...] = ()
    """Open files, pipes and sockets."""
    processes: tuple[str, ...] = ()
    """Command lines of living processes."""


def open_descriptors() -> dict[int, str]:
    """Descriptor -> what it refers to, such as a path or pipe:[12]."""
    found = {}
    for name in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the listing's own descriptor is closed by now
            found[int(name)] = os.readlink(f"/proc/self/fd/{name}")
    return found


def leftovers(before: dict[int, str], base_url: str) -> Leftovers:
    """What this process has now and had not at its start.

    `before`: open_descriptors() at the start. `base_url`: connections to it are no leak, because clients keep
    them open.
    """
    try:
        opened = [fd for fd, target in open_descriptors().items() if before.get(fd) != target]
    except OSError as error:  # as many are open as may be
        return Leftovers(files=(f"not listed: {error.strerror}",))
    files = [name for fd in sorted(opened) if (name := _file_name(fd, base_url)) is not None]
    # Twice: the children of a process that ends during the first walk become children of this one.
    living = {*_living(os.getpid()), *_living(os.getpid())}
    return Leftovers(files=_first(files), processes=_first([_command(pid) for pid in sorted(living)]))


def _first(names: list[str]) -> tuple[str, ...]:
    more = len(names) - MAX_NAMES
    first = [n.encode(errors="replace").decode()[:MAX_CHARACTERS] for n in names[:MAX_NAMES]]  # any bytes
    return (*first, *([f"and {more} more"] if more > 0 else []))


def _file_name(descriptor: int, base_url: str) -> str | None:
    """None for a connection to `base_url`."""
    try:
        if not stat.S_ISSOCK(os.fstat(descriptor).st_mode):
            return os.readlink(f"/proc/self/fd/{descriptor}")
        with socket.socket(fileno=os.dup(descriptor)) as copy:
            peer = copy.getpeername()
    except OSError:
        return "a socket"
    if not isinstance(peer, tuple):
        return f"a socket to {peer!r}" if peer else "a socket"
    url = urlsplit(base_url)
    return None if peer[:2] == (url.hostname, url.port) else f"a socket to {peer[0]}:{peer[1]}"


def _living(pid: int) -> Iterator[int]:
    """The descendants of `pid` that have not ended."""
    for child in sorted(children(pid)):
        if not _is_ending(child):
            yield child
        yield from _living(child)


def _is_ending(pid: int) -> bool:
    """Whether it has ended, or was killed and only needs the processor once more to end."""
    fields = _read(pid, "stat").rpartition(")")[2].split()
    if not fields or fields[0] == "Z" or int(fields[_FLAGS]) & _PF_EXITING:
        return True
    pending = _read(pid, "status").partition("ShdPnd:")[2].split()
    return bool(pending) and bool(int(pending[0], 16) >> (signal.SIGKILL - 1) & 1)


def _command(pid: int) -> str:
    words = _read(pid, "cmdline")
    if words == _read(os.getpid(), "cmdline"):
        return "a fork of the episode"
    return words.replace("\0", " ").strip() or _read(pid, "comm").strip()


def _read(pid: int, name: str) -> str:
    """A file of /proc; empty when the process has ended."""
    try:
        return Path(f"/proc/{pid}/{name}").read_text(errors="replace")
    except OSError:
        return ""
