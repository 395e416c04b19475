"""Open files: how many a process may have, and which ones forked children must not keep.

A forked child that inherited a lock or a reaper pipe would keep it open after this process ends.
"""

from __future__ import annotations

import os
import resource
import weakref
from io import FileIO

from skylite.errors import ConfigError

_PRIVATE: weakref.WeakSet[FileIO] = weakref.WeakSet()


def private_file(descriptor: int, mode: str) -> FileIO:
    """A file object that owns `descriptor`. Forked children close their copy at once; exec closes it too."""
    file = FileIO(descriptor, mode)
    _PRIVATE.add(file)
    return file


def raise_file_limit(needed: int) -> None:
    """Raise the soft limit on open files of this process and its children to `needed`, if it is lower.

    Raises ConfigError if the hard limit is lower.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft == resource.RLIM_INFINITY or soft >= needed:
        return
    if hard != resource.RLIM_INFINITY and hard < needed:
        raise ConfigError(
            f"The run needs {needed} open files, but ulimit -n is {hard} at most for you on this machine.",
            "Ask for a higher limit (limits.conf, or the container's --ulimit nofile), or lower "
            "engine.max_num_seqs.",
        )
    resource.setrlimit(resource.RLIMIT_NOFILE, (needed, hard))


def _close_in_fork() -> None:
    for file in list(_PRIVATE):
        file.close()


os.register_at_fork(after_in_child=_close_in_fork)
