"""Let the kernel kill a process when its parent ends, even by `kill -9`.

Imports only the standard library, because processes call it before their other imports.
"""

from __future__ import annotations

import ctypes
import os
import signal

COMMAND_PID = "SKYLITE_COMMAND_PID"
"""Environment variable set by the reaper (processes/reaper.py): process id of the command it runs.

A direct child of the command compares it with its parent to see whether the command is still alive.
"""

_PR_SET_PDEATHSIG = 1


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exit now if it has ended already.

    Args:
        parent: process id of this process's parent.

    Raises OSError when the kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)
