"""Whether a process still runs. It may end while it is asked: psutil raises then."""

from __future__ import annotations

import psutil


def is_alive(process: psutil.Process) -> bool:
    """False for a zombie too: it only waits to be collected."""
    try:
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return False
