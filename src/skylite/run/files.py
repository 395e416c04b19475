"""Files and folders that are whole or absent, never torn: write beside, fsync, rename."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

TEMPORARY_MARK = ".tmp-"
"""Every unfinished file or folder carries this mark in its name; a reader may ignore, and a sweep may delete, those."""


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
def atomic_file(path: Path, *, durable: bool = True) -> Iterator[Path]:
    """Yield a temporary path to write; on success it becomes `path`, on any error it is removed and `path` is as before.

    Not `durable` is for what a run that goes on after a power cut does not read: whole for every reader, but not waited for.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    try:
        yield temporary
        if durable:
            fsync_path(temporary)
        os.replace(temporary, path)
        if durable:
            fsync_path(path.parent)
    finally:
        temporary.unlink(missing_ok=True)


@contextmanager
def atomic_folder(path: Path) -> Iterator[Path]:
    """Yield a temporary folder to fill; on success it becomes `path` (which must not exist), on any error it is removed."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = temporary_sibling(path)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        for file in temporary.rglob("*"):
            fsync_path(file)
        fsync_path(temporary)
        if path.exists():
            raise FileExistsError(f"{path} exists already; a published folder is never rewritten")
        os.rename(temporary, path)
        fsync_path(path.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


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
