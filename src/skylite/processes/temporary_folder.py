"""Temporary folders of this process. The next start of skylite removes those that a killed process left.

Such a folder has a lock while its process lives, and a mode that other folders of the user with such a name
do not have.
"""

from __future__ import annotations

import fcntl
import os
import re
import stat
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from skylite.processes.file_tree import remove_tree

MODE = 0o1700
"""Of a folder that is locked: for this user only, and sticky, which changes nothing for one user."""
_NAME = re.compile(r"skylite-([a-z]+-)*[a-z0-9_]{8}")
"""A prefix, and what tempfile.mkdtemp adds to it."""
_cleared: set[Path] = set()


class TemporaryFolder:
    """A new folder for this user only, whatever the umask."""

    def __init__(self, kind: str = "", parent: Path | None = None, *, is_inherited: bool = False) -> None:
        """`kind`: word in its name, such as "lib-". `parent`: None for the folder of tempfile.

        `is_inherited`: a program that replaces this process (exec) keeps the folder.
        """
        parent = parent or Path(tempfile.gettempdir())
        if parent not in _cleared:
            _cleared.add(parent)
            clear_unused(parent)
        self.path = Path(tempfile.mkdtemp(prefix=f"skylite-{kind}", dir=parent))
        self._lock: int | None = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY)
        os.set_inheritable(self._lock, is_inherited)
        with suppress(OSError):  # a file system without locks: then nobody but this process removes it
            fcntl.flock(self._lock, fcntl.LOCK_SH | fcntl.LOCK_NB)
            os.fchmod(self._lock, MODE)  # last: before, clear_unused does not touch it

    def remove(self) -> None:
        """Remove it with everything in it. What cannot be removed stays."""
        if self._lock is not None:
            remove_tree(self.path)
            os.close(self._lock)
            self._lock = None


@contextmanager
def temporary_folder(kind: str = "") -> Iterator[Path]:
    """A `TemporaryFolder` that is removed at the end of the block."""
    folder = TemporaryFolder(kind)
    try:
        yield folder.path
    finally:
        folder.remove()


def clear_unused(parent: Path) -> None:
    """Remove the folders that killed processes of this user left in `parent`."""
    for path in unused_folders(parent):
        remove_tree(path)


def unused_folders(parent: Path) -> Iterator[Path]:
    """Such folders. No living process can use one: it is locked while it is yielded."""
    for path in sorted(parent.glob("skylite-*")):
        if not _NAME.fullmatch(path.name) or not _is_own(path):
            continue
        with suppress(OSError):  # such as BlockingIOError: its process lives
            lock = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                yield path
            finally:
                os.close(lock)


def _is_own(path: Path) -> bool:
    try:
        found = path.lstat()
    except OSError:
        return False
    is_marked = stat.S_ISDIR(found.st_mode) and stat.S_IMODE(found.st_mode) == MODE
    return is_marked and found.st_uid == os.getuid()
