"""The descendants of a process: adopting their orphans, and killing them all."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
from collections.abc import Callable

_PR_SET_CHILD_SUBREAPER = 36
STOP_ROUNDS = 10
"""Looks for new descendants while they are stopped. Two do, unless they start each other very fast."""


def adopt_orphans() -> None:
    """Let descendants whose parent ends become children of this process."""
    ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)


def kill_tree(root: int) -> None:
    """Kill a process with its group and its descendants, all stopped first: a stopped one starts no other."""
    found: list[int] = []
    for _ in range(STOP_ROUNDS):
        new = [pid for pid in _descendants(root) if pid not in found]
        if not new:
            break
        for pid in new:
            _signal(os.kill, pid, signal.SIGSTOP)
        found += new
    _signal(os.killpg, root, signal.SIGKILL)
    for pid in found:
        _signal(os.kill, pid, signal.SIGKILL)


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


def _descendants(root: int) -> list[int]:
    """`root`, its children, their children, and so on."""
    found = [root]
    for pid in found:
        found += children(pid) - set(found)
    return found


def children(pid: int) -> set[int]:
    """Process ids of the children of all its threads, zombies too."""
    found: set[int] = set()
    with contextlib.suppress(OSError):  # it may have ended
        for thread in os.listdir(f"/proc/{pid}/task"):
            with open(f"/proc/{pid}/task/{thread}/children", encoding="ascii") as file:
                found.update(map(int, file.read().split()))
    return found
