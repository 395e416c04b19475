"""The size of the folder in which code of the sandbox may write. Imports only the standard library."""

from __future__ import annotations

import stat
from pathlib import Path

from skylite.processes.file_tree import walk

_ENTRY_BYTES = 4096
"""Counted for each file and folder, so that empty ones have a limit, too."""
_WRITE_AND_ENTER = stat.S_IWUSR | stat.S_IXUSR


def is_larger(folder: Path, most: int) -> bool:
    """Whether the files below take more than `most` bytes, or could: a folder that can be filled, not listed.

    A folder with any other mode stays empty: no mode can be changed in the sandbox. Deleted files that are
    still open are not seen.
    """
    size = 0
    try:
        for entry in walk(folder):
            size += _ENTRY_BYTES + 512 * entry.info.st_blocks
            is_hidden = not entry.was_listed and entry.info.st_mode & _WRITE_AND_ENTER == _WRITE_AND_ENTER
            if size > most or is_hidden:
                return True
    except OSError:  # the folder itself cannot be read
        return True
    return False
