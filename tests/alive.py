"""Check whether a process runs. psutil raises if the process ends during the check."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie, too: it has ended."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
