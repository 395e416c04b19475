"""A disk that says no: room is asked for before a write, and a refusal becomes one sentence that names the path."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skylite.errors import WriteFailed, write_failed

RESERVE_BYTES = 16 << 20
"""Left free by every large write, so that status, metrics and the reason itself still fit on a disk that is nearly full."""


def require_space(path: Path, num_bytes: int) -> None:
    """Raise WriteFailed unless the disk that `path` is to lie on has room for `num_bytes` and RESERVE_BYTES."""
    with writing(path):
        free = free_bytes(path)
    if free < num_bytes + RESERVE_BYTES:
        raise WriteFailed(
            f"{path} needs {in_words(num_bytes)}, and its disk has {in_words(free)} free, of which {in_words(RESERVE_BYTES)} are kept for "
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
def writing(path: Path) -> Iterator[None]:
    """Turn an operating system's refusal inside the block into WriteFailed that names `path`."""
    try:
        yield
    except OSError as error:
        raise write_failed(error, path) from error


def in_words(num_bytes: int) -> str:
    """Such as 3.4 GiB or 120 MiB."""
    for unit, size in (("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)):
        if num_bytes >= size:
            return f"{num_bytes / size:.3g} {unit}"
    return f"{num_bytes} bytes"
