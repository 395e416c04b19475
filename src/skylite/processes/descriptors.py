"""Open files that only this process may hold: a forked child (a reward worker, say) closes its copies at once.

A lock or a life line that a forked child keeps open would outlive the process that it stands for.
"""

from __future__ import annotations

import os
import weakref
from io import FileIO

_PRIVATE: weakref.WeakSet[FileIO] = weakref.WeakSet()


def private_file(descriptor: int, mode: str) -> FileIO:
    """A file object over `descriptor` that owns it, closed in every forked child. It is close-on-exec, as Python opens files."""
    file = FileIO(descriptor, mode)
    _PRIVATE.add(file)
    return file


def _close_in_fork() -> None:
    for file in list(_PRIVATE):
        file.close()


os.register_at_fork(after_in_child=_close_in_fork)
