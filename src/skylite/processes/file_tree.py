"""List and remove folders that other programs have filled. No link is followed.

Imports only the standard library (reaper.py, sandbox/).
"""

from __future__ import annotations

import errno
import os
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path


def entries_below(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Everything below a folder; a folder comes before what is in it. Raises OSError for what it cannot list.

    That includes a path that is longer than the kernel takes.
    """
    left = [str(folder)]
    while left:
        with os.scandir(left.pop()) as listing:
            for entry in listing:
                yield entry
                if entry.is_dir(follow_symlinks=False):
                    left.append(entry.path)


def remove_tree(path: str | Path) -> OSError | None:
    """Remove a folder with everything in it, or a file or link. Returns why it is not gone; never raises.

    A missing path is gone. What cannot be removed stays, and the rest goes. Removed by `rm`: in Python,
    standard functions fail at a thousand nested folders, and where a folder moves meanwhile.
    """
    try:
        if not stat.S_ISDIR(os.lstat(path).st_mode):
            os.unlink(path)
            return None
    except FileNotFoundError:
        return None
    except OSError as error:
        return error
    remove = ("rm", "-rf", "--one-file-system", "--", str(path))
    if reason := _run(*remove):
        _run("chmod", "-R", "u+rwx", "--", str(path))  # folders that their owner may not list or change
        reason = _run(*remove)
    if not reason:
        return None
    number = next((n for n in errno.errorcode if os.strerror(n) == reason), errno.EIO)
    return OSError(number, reason, str(path))


def tree_bytes(path: str | Path) -> int:
    """Size of the files in a folder, or of a file; 0 if it cannot be listed in full."""
    try:
        info = os.lstat(path)
        if not stat.S_ISDIR(info.st_mode):
            return info.st_size
        sizes = (entry.stat(follow_symlinks=False) for entry in entries_below(path))
        return sum(info.st_size for info in sizes if not stat.S_ISDIR(info.st_mode))
    except OSError:
        return 0


def files_below(folder: Path) -> list[str]:
    """Relative paths of the files in a folder; a link to a file counts. Raises OSError."""
    top = os.path.realpath(folder)
    return sorted(os.path.relpath(entry.path, top) for entry in entries_below(top) if entry.is_file())


def _run(*command: str) -> str:
    """Why the command failed, such as "Permission denied"; empty if it did not."""
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            check=False,
            env={**os.environ, "LC_ALL": "C"},
        )
    except OSError as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"{command[0]} ended with exit code {done.returncode}"]
    return "" if done.returncode == 0 else lines[0].rpartition(": ")[2]
