"""One copy of a model in shared memory (/dev/shm), read by the trainer ranks and engines of all runs."""

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
"""Files to skip: other formats of the same weights. Only safetensors are loaded."""


def shared_copy(fingerprint: str) -> Path:
    """Folder for the copy of the model with this fingerprint."""
    return SHARED_MEMORY / f"skylite-model-{fingerprint[:16]}"


@contextmanager
def model_in_shared_memory(model: Path, copy: Path) -> Iterator[None]:
    """Keep the files of `model` in the folder `copy` inside the block. The last run that uses it removes it.

    Two lock files next to `copy` coordinate the runs. Each user holds the users lock shared, so that a run
    can detect that it is the last one. The change lock, held briefly, serializes creation and removal.

    Raises ConfigError when shared memory is too small, WriteFailed when a write fails.
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
            f"model.use_shm=true needs {size / 1e9:.1f} GB in {copy.parent} for {model}, but only "
            f"{free / 1e9:.1f} GB are free there.",
            "Set model.use_shm to false, or free space there.",
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
    # Rename first: if a kill left a partial folder under its final name, the next run would load it.
    with convert_os_errors(copy):
        copy.rename(_temporary(copy))
        shutil.rmtree(_temporary(copy))


def _temporary(copy: Path) -> Path:
    return copy.with_name(f".{copy.name}{TEMPORARY_MARK}")
