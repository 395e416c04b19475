"""Files and folders that are whole or absent, never torn: write beside, fsync, rename."""

from __future__ import annotations

import ctypes
import errno
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path
from typing import Any

from skylite.errors import WriteFailed, write_failed

TEMPORARY_MARK = ".tmp-"
"""Every unfinished file or folder carries this mark in its name; a reader may ignore, and a sweep may delete, those."""


AT_FDCWD, RENAME_EXCHANGE = -100, 2
"""Of <fcntl.h> and <linux/fs.h>."""


def fsync_path(path: Path) -> None:
    """Flush a file's data, or a folder's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def temporary_sibling(path: Path) -> Path:
    """A name beside `path`, on the same file system, so that a rename to `path` is atomic."""
    return path.with_name(f".{path.name}{TEMPORARY_MARK}{os.getpid()}")


@contextmanager
def atomic_file(path: Path, num_bytes: int = 0, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write; on success it becomes `path`, on any error it is removed and `path` is as before.

    Args:
        num_bytes: about what will be written. The disk is asked for that much room first; 0 (small files) may use the reserve.
        durable: False is for what a run that goes on after a power cut can do without: whole for every reader, but not waited for, so
            that the file may be found empty then.

    Raises WriteFailed when the disk refuses.
    """
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if num_bytes:
            require_space(path, num_bytes)
        temporary = temporary_sibling(path)
        try:
            yield temporary
            if durable:
                fsync_path(temporary)
            os.replace(temporary, path)
            if durable:
                fsync_path(path.parent)
        finally:
            _remove_file(temporary)


@contextmanager
def atomic_folder(path: Path, num_bytes: int = 0) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it becomes `path` (which must not exist), on any error it is removed.

    Args:
        num_bytes: as for `atomic_file`.

    Raises WriteFailed when the disk refuses, or `path` is there already.
    """
    with convert_os_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        if num_bytes:
            require_space(path, num_bytes)
        temporary = temporary_sibling(path)
        shutil.rmtree(temporary, ignore_errors=True)
        temporary.mkdir()
        try:
            yield temporary
            for file in temporary.rglob("*"):
                fsync_path(file)
            fsync_path(temporary)
            if path.exists():
                raise WriteFailed(
                    f"{path} exists already; a published folder is never rewritten.", "Move it away."
                )
            os.rename(temporary, path)
            fsync_path(path.parent)
        finally:
            shutil.rmtree(temporary, ignore_errors=True)


def append_line(path: Path, line: str, *, durable: bool = True) -> None:
    """Append a line, whole or not at all. Raises WriteFailed, and leaves the file as it was.

    What a process that was killed while writing left of its last line is cut away first, so that only a last line is ever torn.
    """
    with convert_os_errors(path), FileIO(path, "ab+") as stream:
        whole = _cut_torn_line(stream)
        data = line.encode() + b"\n"
        try:
            while data:  # a disk that fills up takes a part first and refuses the rest
                data = data[stream.write(data) :]
            if durable:
                os.fsync(stream.fileno())
        except OSError:
            os.truncate(path, whole)
            raise


def _cut_torn_line(stream: FileIO) -> int:
    """The size of the file, which then ends with a whole line."""
    size = os.fstat(stream.fileno()).st_size
    if size and os.pread(stream.fileno(), 1, size - 1) != b"\n":
        size = os.pread(stream.fileno(), size, 0).rfind(b"\n") + 1
        stream.truncate(size)
    return size


def swap_paths(one: Path, other: Path) -> None:
    """Let two paths of a file system change places in one step, so that there is no moment without either. Raises OSError."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.renameat2(AT_FDCWD, os.fsencode(one), AT_FDCWD, os.fsencode(other), RENAME_EXCHANGE) == 0:
        return
    number = ctypes.get_errno()
    if number not in (errno.EINVAL, errno.ENOSYS):
        raise OSError(number, os.strerror(number), str(other))
    _swap_by_renames(one, other)


def _swap_by_renames(one: Path, other: Path) -> None:
    """For a file system that cannot do it at once (NFS, say): a kill in between leaves `other` under a marked name beside it."""
    aside = other.with_name(f"{temporary_sibling(other).name}-old")
    os.rename(other, aside)
    try:
        os.rename(one, other)
    except OSError:
        os.rename(aside, other)
        raise
    os.rename(aside, one)


def _remove_file(path: Path) -> None:
    """A leftover that cannot be removed keeps its mark, so nobody takes it for more; why the write failed is what matters then."""
    with suppress(OSError):
        path.unlink()


def write_json(path: Path, value: Any, *, durable: bool = True) -> None:
    """Write JSON atomically."""
    with atomic_file(path, durable=durable) as temporary:
        temporary.write_text(json.dumps(value, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")


def sha256_file(path: Path, *, on_bytes: Callable[[int], None] = lambda _: None) -> str:
    """Hex sha256 of a file; `on_bytes` hears of every chunk read."""
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while chunk := stream.read(1 << 20):
            digest.update(chunk)
            on_bytes(len(chunk))
    return digest.hexdigest()


RESERVE_BYTES = 16 << 20
"""Left free by every large write, so that status, metrics and the reason itself still fit on a disk that is nearly full."""


def require_space(path: Path, num_bytes: int) -> None:
    """Raise WriteFailed unless the disk that `path` is to lie on has room for `num_bytes` and RESERVE_BYTES."""
    with convert_os_errors(path):
        free = free_bytes(path)
    if free < num_bytes + RESERVE_BYTES:
        raise WriteFailed(
            f"{path} needs {format_bytes(num_bytes)}, and its disk has {format_bytes(free)} free, of which {format_bytes(RESERVE_BYTES)} are kept for "
            "status and metrics; it was not written.",
            "Make room on that disk.",
        )


def free_bytes(path: Path) -> int:
    """Bytes that we may still write on the disk of `path`, which need not exist yet."""
    folder = path
    while not folder.is_dir() and folder != folder.parent:
        folder = folder.parent
    return shutil.disk_usage(folder).free


@contextmanager
def convert_os_errors(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal inside the block into WriteFailed that names `path`."""
    try:
        yield
    except OSError as error:
        raise write_failed(error, path) from error


def format_bytes(num_bytes: int) -> str:
    """Such as 3.4 GiB or 120 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
