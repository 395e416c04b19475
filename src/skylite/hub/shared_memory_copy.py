"""One copy of a model in shared memory (/dev/shm), read by the trainer ranks and engines of all runs.

Buys a faster start where the disk is slow (not measured). Elsewhere the page cache does the same, so it is
off by default.
"""

from __future__ import annotations

import fcntl
import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from io import FileIO
from pathlib import Path

from skylite.errors import ConfigError
from skylite.hub.model_files import model_files
from skylite.processes.file_tree import remove_tree
from skylite.progress_reporting import LongWork, long_work
from skylite.run.files import TEMPORARY_MARK, convert_os_errors
from skylite.run.private_folder import OTHERS_MAY_ENTER, is_own_folder, make_own_folder, open_lock
from skylite.untrusted_files import open_file

SHARED_MEMORY = Path("/dev/shm")
CHANGE_LOCK, USERS_LOCK = "change.lock", ".users.lock"
"""Name of the lock of the user's folder, and end of the name of a copy's lock."""
COPY_CHUNK = 16 << 20
"""Bytes between two updates of the progress."""
OTHER_FORMATS = (
    "*.bin",
    "*.pth",
    "*.pt",
    "*.gguf",
    "*.onnx",
    "*.h5",
    "*.msgpack",
    "original",
    "onnx",
    ".cache",
)
"""Files to skip: other formats of the same weights. Only safetensors are loaded."""


def shared_copy(fingerprint: str) -> Path:
    """Folder for the copy of the model with this fingerprint, in a folder that only this user may enter."""
    return _own_folder() / f"model-{fingerprint[:16]}"


@contextmanager
def model_in_shared_memory(model: Path, copy: Path) -> Iterator[None]:
    """Keep the files of `model` in the folder `copy` inside the block. The last run that uses it removes it.

    Each run holds the users lock of its copy shared, so that a run can detect that it is the last one. The
    change lock of the parent folder, held briefly, serializes creation and removal. The start also removes
    the copies of runs that were killed.

    Raises ConfigError when shared memory is too small or another user's folder is in the way, WriteFailed
    when a write fails.
    """
    make_own_folder(
        copy.parent,
        OTHERS_MAY_ENTER,
        "Remove that folder (its owner or root can), or set model.use_shm to false.",
    )
    with open_lock(copy.parent / CHANGE_LOCK) as change:
        with _exclusive(change):
            _remove_leftovers(copy.parent)
            # Opened under the change lock: a run that ends could remove the file before this one locks it.
            users = open_lock(_users_lock(copy))
            fcntl.flock(users, fcntl.LOCK_SH)
        try:
            # Shown from before the lock: another run may hold it while it copies.
            with (
                long_work("copying the model to shared memory", in_bytes=True) as work,
                _exclusive(change),
                convert_os_errors(copy),
            ):
                if not copy.exists():
                    _copy(model, copy, work)
            yield
        finally:
            with _exclusive(change), users:
                _remove_if_unused(copy, users)


def remove_unused_copies() -> None:
    """Remove this user's copies that killed runs left.

    Does nothing while another run copies or cleans up, which does the same itself. Does nothing either where
    the folder is missing or not private: then no run of this user made it.
    """
    folder = _own_folder()
    if not is_own_folder(folder, OTHERS_MAY_ENTER):
        return
    with open_lock(folder / CHANGE_LOCK) as change:
        try:
            fcntl.flock(change, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return
        _remove_leftovers(folder)


def _own_folder() -> Path:
    return SHARED_MEMORY / f"skylite-{os.geteuid()}"


def _users_lock(copy: Path) -> Path:
    return copy.with_name(f"{copy.name}{USERS_LOCK}")


@contextmanager
def _exclusive(lock: FileIO) -> Iterator[None]:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


def _remove_leftovers(folder: Path) -> None:
    """Remove what killed runs left. The caller holds the change lock, so no other run is copying."""
    for lock in folder.glob(f"*{USERS_LOCK}"):
        with open_lock(lock) as users:
            _remove_if_unused(lock.with_name(lock.name.removesuffix(USERS_LOCK)), users)
    with convert_os_errors(folder):
        for torn in folder.glob(f".*{TEMPORARY_MARK}*"):
            if problem := remove_tree(torn):
                raise problem


def _copy(model: Path, copy: Path, work: LongWork) -> None:
    ignore = shutil.ignore_patterns(*OTHER_FORMATS)
    kept = [f for f in model_files(model) if f.name not in ignore(str(model), [f.name])]
    size, free = sum(f.stat().st_size for f in kept), shutil.disk_usage(copy.parent).free
    if size > free:
        raise ConfigError(
            f"model.use_shm=true needs {size / 1e9:.1f} GB in {copy.parent} for {model}, but only "
            f"{free / 1e9:.1f} GB are free there.",
            "Set model.use_shm to false, or free space there.",
        )
    work.total = size
    temporary = _temporary(copy)
    remove_tree(temporary)
    temporary.mkdir(mode=0o700)
    try:
        for file in kept:
            _copy_file(file, temporary / file.name, work)
        temporary.rename(copy)
    finally:
        remove_tree(temporary)


def _copy_file(source: Path, target: Path, work: LongWork) -> None:
    with open_file(source) as read, target.open("xb") as written:
        while chunk := read.read(COPY_CHUNK):
            written.write(chunk)
            work.advance(len(chunk))


def _remove_if_unused(copy: Path, users: FileIO) -> None:
    """Remove the copy and its users lock unless another run holds the lock."""
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    with convert_os_errors(copy):
        if copy.exists():
            # Rename first: if a kill left a partial folder under its final name, the next run would load it.
            copy.rename(_temporary(copy))
            if problem := remove_tree(_temporary(copy)):
                raise problem
        _users_lock(copy).unlink(missing_ok=True)


def _temporary(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}{TEMPORARY_MARK}")
