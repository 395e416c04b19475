"""The folder in which code of the sandbox may write. Imports only the standard library."""

from __future__ import annotations

import os
import shutil
import stat
from pathlib import Path

_ENTRY_BYTES = 4096
"""Counted for each file and folder, so that empty ones have a limit, too."""
_WRITE_AND_ENTER = stat.S_IWUSR | stat.S_IXUSR


def empty(folder: Path) -> bool:
    """Remove what the last call left. Returns whether everything could be removed."""
    for path in folder.iterdir():
        try:
            shutil.rmtree(path) if path.is_dir() and not path.is_symlink() else path.unlink()
        except OSError:  # such as a folder that its owner may not list
            return False
    return True


def is_larger(folder: Path, most: int) -> bool:
    """Whether the files below take more than `most` bytes, or could: a folder that can be filled, not listed.

    Deleted files that are still open are not seen.
    """
    size, folders = 0, [str(folder)]
    while folders and size <= most:
        where = folders.pop()
        try:
            with os.scandir(where) as entries:
                for entry in entries:
                    size += _ENTRY_BYTES + 512 * entry.stat(follow_symlinks=False).st_blocks
                    if entry.is_dir(follow_symlinks=False):
                        folders.append(entry.path)
                    if size > most:
                        return True
        except (FileNotFoundError, NotADirectoryError):  # it has been removed
            continue
        except OSError:
            if _can_be_filled(where):
                return True
    return size > most


def _can_be_filled(folder: str) -> bool:
    """A folder with any other mode stays empty: no mode can be changed in the sandbox."""
    try:
        return os.lstat(folder).st_mode & _WRITE_AND_ENTER == _WRITE_AND_ENTER
    except FileNotFoundError:
        return False
    except OSError:  # such as a path that is too long
        return True
