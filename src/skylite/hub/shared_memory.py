"""A model's files held in memory (/dev/shm) once, for trainer ranks and engines to read from, however many runs use them."""

from __future__ import annotations

import fcntl
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

from skylite.errors import ConfigError
from skylite.run.files import TEMPORARY_MARK, convert_os_errors

SHARED_MEMORY = Path("/dev/shm")
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
"""Other forms of the same weights; only safetensors are loaded."""


def shared_copy(fingerprint: str) -> Path:
    """Where the copy of a model with this fingerprint lies."""
    return SHARED_MEMORY / f"skylite-model-{fingerprint[:16]}"


@contextmanager
def model_in_shared_memory(model: Path, copy: Path) -> Iterator[None]:
    """`copy` holds the files of `model` inside the block; the last run that uses it removes it.

    Raises ConfigError when memory has no room for it, WriteFailed when it is refused all the same. Two lock files beside the copy: one is
    held shared by whoever uses it, so that the last can be known; the other, held briefly, keeps making and removing apart.
    """
    with _open_lock(Path(f"{copy}.users.lock")) as users, _open_lock(Path(f"{copy}.change.lock")) as change:
        with _exclusive(change), convert_os_errors(copy):
            fcntl.flock(users, fcntl.LOCK_SH)
            if not copy.exists():
                _copy(model, copy)
        try:
            yield
        finally:
            with _exclusive(change):
                _remove_if_last(copy, users)


def _open_lock(lock: Path) -> IO[str]:
    with convert_os_errors(lock):
        return lock.open("w")


@contextmanager
def _exclusive(lock: IO[str]) -> Iterator[None]:
    fcntl.flock(lock, fcntl.LOCK_EX)
    try:
        yield
    finally:
        fcntl.flock(lock, fcntl.LOCK_UN)


def _copy(model: Path, copy: Path) -> None:
    ignore = shutil.ignore_patterns(*OTHER_FORMATS)
    kept = [f for f in model.iterdir() if f.is_file() and f.name not in ignore(str(model), [f.name])]
    size, free = sum(f.stat().st_size for f in kept), shutil.disk_usage(copy.parent).free
    if size > free:
        raise ConfigError(
            f"model.use_shm=true needs {size / 1e9:.1f} GB in {copy.parent} for {model}, and {free / 1e9:.1f} GB are free there.",
            "Leave model.use_shm false, or make room.",
        )
    temporary = _temporary(copy)
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(mode=0o700)
    try:
        for file in kept:
            shutil.copy(file, temporary / file.name)
        temporary.rename(copy)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def _remove_if_last(copy: Path, users: IO[str]) -> None:
    try:
        fcntl.flock(users, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return
    # First out of sight: what a kill leaves of it under its own name, the next run would take for the model.
    with convert_os_errors(copy):
        copy.rename(_temporary(copy))
        shutil.rmtree(_temporary(copy))


def _temporary(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}{TEMPORARY_MARK}")
