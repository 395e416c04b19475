"""Atomic writes of files and folders: write a temporary sibling, fsync, rename."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import secrets
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from skylite.errors import WriteFailed, convert_os_errors
from skylite.processes.file_tree import entries_below, remove_tree
from skylite.untrusted_files import create_new, open_file, open_to_append

TEMPORARY_MARK = ".tmp-"
"""Part of the name of every unfinished file or folder: readers ignore them, and clean-up deletes them."""

AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""From <fcntl.h> and <linux/fs.h>."""


def fsync_path(path: Path) -> None:
    """Flush a file's data or a folder's entries to disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """A temporary name in the same folder as `path`, so that renaming it to `path` is atomic.

    Random: a stranger's folder could hold a link under a name that can be foreseen.
    """
    return path.with_name(f".{path.name}{TEMPORARY_MARK}{secrets.token_hex(8)}")


@contextmanager
def atomic_file(path: Path, num_bytes: int = 0, *, once: bool = False) -> Iterator[Path]:
    """Yield a temporary path to write, renamed to `path` on success.

    An error removes the temporary file and leaves `path` unchanged.

    Args:
        num_bytes: approximate size, checked against free space before writing. 0 (small files) may use the
            reserve (RESERVE_BYTES).
        once: leave a file that exists, also one that another machine made and this one does not see yet.

    Raises WriteFailed.
    """
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if num_bytes:
            require_space(path, num_bytes)
        temporary = temporary_sibling(path)
        create_new(temporary)
        try:
            yield temporary
            fsync_path(temporary)
            (_link_once if once else os.replace)(temporary, path)
            fsync_path(path.parent)
        finally:
            _remove_file(temporary)


@contextmanager
def atomic_folder(path: Path, num_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary folder to fill, renamed to `path` on success; an error removes it.

    Args:
        num_bytes: as for `atomic_file`.

    Raises WriteFailed, also when `path` exists.
    """
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if num_bytes:
            require_space(path, num_bytes)
        temporary = temporary_sibling(path)
        temporary.mkdir()
        try:
            yield temporary
            for entry in entries_below(temporary):
                fsync_path(Path(entry.path))
            fsync_path(temporary)
            if path.exists():
                raise WriteFailed(
                    f"{path} already exists, and skylite never overwrites a published folder.",
                    "Move it away.",
                )
            os.rename(temporary, path)
            fsync_path(path.parent)
        finally:
            remove_tree(temporary)


def append_line(path: Path, line: str) -> None:
    """Append a complete line, or raise WriteFailed and leave the file unchanged.

    First cuts off an incomplete last line from a killed writer, so that only the last line can be incomplete.
    """
    with convert_os_errors(path), FileIO(open_to_append(path), "ab+") as stream:
        old_size = _cut_torn_line(stream)
        data = line.encode() + b"\n"
        try:
            while data:  # a disk that fills up accepts a part before it refuses the rest
                data = data[stream.write(data) :]
            os.fsync(stream.fileno())
        except OSError:
            os.truncate(path, old_size)
            raise


def _cut_torn_line(stream: FileIO) -> int:
    """Cut off an incomplete last line. Returns the size of the file."""
    size = os.fstat(stream.fileno()).st_size
    if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
        size = os.pread(stream.fileno(), size, 0).rfind(b"\n") + 1
        stream.truncate(size)
    return size


def swap_paths(one: Path, other: Path) -> None:
    """Swap two paths on one file system atomically, so that both always exist. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(other))
    _swap_by_renames(one, other)


def _swap_by_renames(one: Path, other: Path) -> None:
    """Swap on a file system without an atomic swap (e.g. NFS).

    A kill in between leaves the content of `other` in its folder under a temporary name.
    """
    old = other.with_name(f"{temporary_sibling(other).name}-old")
    os.rename(other, old)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(old, other)
        raise
    os.rename(old, one)


def _link_once(temporary: Path, path: Path) -> None:
    try:
        os.link(temporary, path)
    except FileExistsError:
        return
    except OSError:  # a file system without hard links
        if not path.exists():
            os.replace(temporary, path)


def _remove_file(path: Path) -> None:
    """Remove a temporary file.

    Ignores failures: the file keeps its temporary name, and the error of the write matters more.
    """
    with suppress(OSError):
        path.unlink()


def write_json(path: Path, value: Any, *, once: bool = False) -> None:
    """Write JSON atomically. `once`: as for `atomic_file`. Raises WriteFailed."""
    with atomic_file(path, once=once) as temporary:
        text = json.dumps(value, indent=1, ensure_ascii=False) + "\n"
        # A lone surrogate becomes an escape such as \\udc80, which is valid JSON.
        temporary.write_text(text, encoding="utf-8", errors="backslashreplace")


def sha256_file(path: Path, *, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Hex sha256 of a file. `on_bytes` receives the size of each chunk that is read."""
    digest = hashlib.sha256()
    with open_file(path) as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


RESERVE_BYTES = 16 << 20
"""Large writes leave this much free for status, metrics and the error message on a nearly full disk."""


def require_space(path: Path, num_bytes: int) -> None:
    """Raise WriteFailed unless the disk of `path` has `num_bytes` and RESERVE_BYTES free."""
    with convert_os_errors(path):
        free = free_bytes(path)
    if free < num_bytes + RESERVE_BYTES:
        raise WriteFailed(
            f"{path} needs {format_bytes(num_bytes)}, but its disk has only {format_bytes(free)} free, of "
            f"which {format_bytes(RESERVE_BYTES)} are reserved for status and metrics; it was not written.",
            "Free space on that disk.",
        )


def free_bytes(path: Path) -> int:
    """Free bytes on the disk of `path`, which need not exist yet."""
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


def format_bytes(num_bytes: int) -> str:
    """A size as text, such as "3.4 GiB" or "120 MiB"."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
