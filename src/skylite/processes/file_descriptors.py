"""Open files that forked children (for example, reward workers) must not keep.

A forked child that inherited a lock or a reaper pipe would keep it open after this process ends.
"""

from __future__ import annotations

import os
import weakref
from io import FileIO

_PRIVATE: weakref.WeakSet[FileIO] = weakref.WeakSet()


def private_file(descriptor: int, mode: str) -> FileIO:
    """A file object that owns `descriptor`. Forked children close their copy at once; exec closes it too."""
    file = FileIO(descriptor, mode)
    _PRIVATE.add(file)
    return file


def _close_in_fork() -> None:
    for file in list(_PRIVATE):
        file.close()


os.register_at_fork(after_in_child=_close_in_fork)
