"""The kernel's word that a process ends with its parent, `kill -9` included. Standard library alone: called before anything else."""

from __future__ import annotations

import ctypes
import os
import signal

COMMAND_PID = "SKYLITE_COMMAND_PID"
"""Environment variable that the reaper (processes/reaper.py) sets: process id of the command it runs. It tells a direct child of the command
whether its parent is still the one that started it."""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Have the kernel kill this process when `parent` ends, which must be its own parent; end now when it has ended already."""
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # it ended before the kernel knew
        os._exit(1)
