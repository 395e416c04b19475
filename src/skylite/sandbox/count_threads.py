"""Limits how many threads a call starts. No limit of resources does that for root, nor cheaply for others.

A seccomp filter asks a small process before each new thread (seccomp_unotify(2), Linux 5.5). It counts, and
refuses what is too many. Imports only the standard library.
"""

from __future__ import annotations

import errno
import fcntl
import os
import select
import struct
from typing import NoReturn

from skylite.processes.reaper import die_with_parent
from skylite.sandbox.seccomp import install_with_listener, thread_filter

MOST_THREADS = 1000
"""That one process of calls may start."""
_RECEIVE, _SEND = 0xC0502100, 0xC0182101  # ioctls of the listener
_QUESTION_BYTES = 80
_ANSWER = struct.Struct("=Qqii")
_CONTINUE = 1
_OLDEST = (5, 5)


def count_threads(arch: int, private: tuple[int, ...]) -> int | None:
    """Limit this process and all that it starts. Returns a pipe: a byte written to it starts a new count.

    None if the kernel cannot do it. `private`: descriptors that the counting process must not have.
    """
    release = os.uname().release.replace("-", ".").split(".")
    if tuple(int(n) for n in release[:2] if n.isdigit()) < _OLDEST:
        return None
    try:
        listener = install_with_listener(thread_filter(arch), arch)
    except OSError:  # such as EBUSY: something outside of skylite listens already
        return None
    (resets, own_end), server = os.pipe(), os.getpid()
    if os.fork() == 0:
        for descriptor in (own_end, *private):
            os.close(descriptor)
        _count(listener, resets, server)
    os.close(listener)
    os.close(resets)
    return own_end


def _count(listener: int, resets: int, server: int) -> NoReturn:
    """The counting process."""
    started = 0
    try:
        die_with_parent(server)
        while True:
            ready, _, _ = select.select([resets, listener], [], [])
            if resets in ready:
                if not os.read(resets, 4096):
                    break
                started = 0
            if listener in ready:
                started += _answer(listener, started < MOST_THREADS)
    finally:
        os._exit(0)


def _answer(listener: int, allowed: bool) -> bool:
    """Answer one question. Returns whether a thread starts."""
    question = bytearray(_QUESTION_BYTES)
    try:
        fcntl.ioctl(listener, _RECEIVE, question)
        (number,) = struct.unpack_from("=Q", question)
        answer = (number, 0, 0, _CONTINUE) if allowed else (number, 0, -errno.EAGAIN, 0)
        fcntl.ioctl(listener, _SEND, _ANSWER.pack(*answer))
    except OSError:  # it was killed while it asked
        return False
    return allowed
