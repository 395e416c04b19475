"""Folders and lock files in places where other users may write, such as /dev/shm and /tmp.

Another user can create a folder or a link there first, under a name that skylite will use.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import FileIO
from pathlib import Path

from skylite.errors import ConfigError
from skylite.processes.private_folders import walk
from skylite.processes.streams import private_file
from skylite.run.files import convert_os_errors

OTHERS_MAY_ENTER, OTHERS_MAY_WRITE = 0o077, 0o022
"""Bits of a mode that a folder must not have."""


def make_own_folder(folder: Path, forbidden: int, hint: str) -> None:
    """Create the folder with mode 0700, or check an existing one.

    Raises ConfigError if it is a link, is another user's, or its mode has a `forbidden` bit; WriteFailed.
    """
    with convert_os_errors(folder):
        folder.parent.mkdir(parents=True, exist_ok=True)
        with suppress(FileExistsError):
            folder.mkdir(mode=0o700)
            return
        found = os.lstat(folder)
    if problem := _folder_problem(found, forbidden):
        raise ConfigError(f"{folder} {problem}; another user could change what this run reads.", hint)


def is_own_folder(folder: Path, forbidden: int) -> bool:
    """Whether it is a folder of this user whose mode has no `forbidden` bit."""
    try:
        return not _folder_problem(os.lstat(folder), forbidden)
    except FileNotFoundError:
        return False


def require_own_links(path: Path, hint: str) -> None:
    """Raise ConfigError if a link on the way to `path` belongs to another user, who can change it."""
    for place, found in walk(path):
        if stat.S_ISLNK(found.st_mode) and found.st_uid not in (os.geteuid(), 0):
            raise ConfigError(
                f"{place} is a link of the user with id {found.st_uid}, not yours; "
                "another user could change what this run reads.",
                hint,
            )


def _folder_problem(found: os.stat_result, forbidden: int) -> str:
    if stat.S_ISLNK(found.st_mode):
        return "is a symbolic link"
    if not stat.S_ISDIR(found.st_mode):
        return "is not a folder"
    if found.st_uid != os.geteuid():
        return f"belongs to the user with id {found.st_uid}, not to you"
    mode = stat.S_IMODE(found.st_mode)
    return f"is open to other users (mode 0{mode:o})" if mode & forbidden else ""


def open_lock(path: Path) -> FileIO:
    """Open or create a lock file, without changing its content. Forked children do not keep it.

    Only this user may read it: who can open a file can hold its lock.
    Raises ConfigError if it is not a plain file with one name: writing the lock would change another file.
    Raises WriteFailed.
    """
    with convert_os_errors(path):
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK, 0o600)
        except OSError as error:
            if error.errno not in (errno.ELOOP, errno.EISDIR):
                raise
            kind = "a symbolic link" if error.errno == errno.ELOOP else "a folder"
            raise _no_lock(path, kind) from None
        stream = private_file(descriptor, "r+b")
        found = os.fstat(descriptor)
    if not stat.S_ISREG(found.st_mode) or found.st_nlink > 1:
        stream.close()
        raise _no_lock(path, "a hard link to another file" if found.st_nlink > 1 else "a pipe or device")
    return stream


def _no_lock(path: Path, kind: str) -> ConfigError:
    return ConfigError(
        f"{path} is {kind}, and a lock must be a plain file with one name; it was not used.", "Remove it."
    )
