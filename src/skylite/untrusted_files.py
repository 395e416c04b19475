"""Open files that may be a stranger's: in runs, data, models and adapters.

A pipe or device in place of a file would block for ever, and a link in place of one that skylite writes would
lead elsewhere.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path
from typing import BinaryIO


class NotAFile(OSError):
    """A pipe, socket or device in place of a file."""


def open_file(path: Path) -> BinaryIO:
    """Open a file for reading. Raises OSError, also if it is no regular file, and never waits."""
    return os.fdopen(_open_regular(path, os.O_RDONLY), "rb")


def open_to_append(path: Path, mode: int = 0o666) -> int:
    """Descriptor of a file to append to and read; made if missing. Raises OSError, also for a link."""
    return _open_regular(path, os.O_RDWR | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, mode)


def create_new(path: Path) -> None:
    """Make an empty file. Raises FileExistsError also for a link, wherever it leads."""
    os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o666))


def regular(path: Path) -> Path:
    """`path`, for a library that opens it itself. Raises OSError if it is no regular file."""
    os.close(_open_regular(path, os.O_RDONLY))
    return path


def read_bytes(path: Path) -> bytes:
    """As Path.read_bytes. Raises OSError, also if it is no regular file."""
    with open_file(path) as stream:
        return stream.read()


def read_text(path: Path, encoding: str = "utf-8") -> str:
    """The text of a file. Raises UnicodeDecodeError and OSError, also if it is no regular file."""
    return read_bytes(path).decode(encoding).replace("\r\n", "\n").replace("\r", "\n")


def _open_regular(path: Path, flags: int, mode: int = 0) -> int:
    # O_NONBLOCK: opening a pipe returns at once. It changes nothing for a regular file.
    descriptor = os.open(path, flags | os.O_NONBLOCK | os.O_CLOEXEC, mode)
    found = os.fstat(descriptor).st_mode
    if stat.S_ISREG(found):
        return descriptor
    os.close(descriptor)
    if stat.S_ISDIR(found):
        raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(path))
    raise NotAFile(errno.EINVAL, "It is a pipe, socket or device, not a file", str(path))
