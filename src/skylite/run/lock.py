"""An advisory lock that allows one live run per folder; the kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from skylite.config.lora import LoraConfig
from skylite.errors import ConfigError
from skylite.run.files import convert_os_errors
from skylite.run.private_folder import OTHERS_MAY_WRITE, make_own_folder, open_lock, require_own_links
from skylite.untrusted_files import read_text

LOCK_NAME = ".skylite.lock"
_HINT = "Choose a new folder, which skylite creates with mode 0700; or make this one yours alone (chmod 700)."
_SYNC_HINT = f"That is lora.lora_sync_path. {_HINT}"


@contextmanager
def lock_run(root: Path, adapters: Path, lora: LoraConfig) -> Iterator[None]:
    """Lock a run's folder and the folder that it publishes adapters in.

    Raises as `lock_folder`, and ConfigError if another user's link leads to one of them.
    """
    require_own_links(root, _HINT)
    if lora.lora_sync_path is not None:
        for path in (Path(lora.lora_sync_path), adapters):  # as given, and as recorded at the run's start
            require_own_links(path, _SYNC_HINT)
    with (
        lock_folder(root.resolve()),
        lock_folder(adapters, _HINT if lora.lora_sync_path is None else _SYNC_HINT),
    ):
        yield


@contextmanager
def lock_folder(folder: Path, hint: str = _HINT) -> Iterator[None]:
    """Lock `folder` while the block runs. Raises ConfigError with the pid of the live owner, or WriteFailed.

    Creates it with mode 0700. Raises ConfigError with `hint` if others own it or may write to it: it may be
    where other users write, such as in /dev/shm.
    The kernel releases the lock even after `kill -9`, so a leftover lock file locks nothing; only its pid is
    stale. At the end the lock file is removed, and the folder too if the lock created it and it is still
    empty.
    """
    path, is_new = folder / LOCK_NAME, not folder.exists()
    with _locked(path, hint) as stream:
        try:
            with convert_os_errors(path):
                stream.truncate(0)
                stream.write(b"%d\n" % os.getpid())
            yield
        finally:
            with suppress(OSError):  # a leftover file locks nothing
                path.unlink()
                if is_new:
                    folder.rmdir()


def is_locked(lock: Path) -> bool:
    """Whether a live process holds this lock. Changes nothing."""
    try:
        descriptor = os.open(lock, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


def refuse_live(folder: Path) -> None:
    """Raise ConfigError with the pid of the live run that has locked `folder`. Changes nothing."""
    lock = folder / LOCK_NAME
    if is_locked(lock):
        with suppress(OSError):
            raise _owned(folder, read_text(lock).strip())


def _owned(folder: Path, owner: str) -> ConfigError:
    return ConfigError(
        f"{folder} belongs to another live run (pid {owner or 'unknown'}).",
        "Wait for it, stop it, or choose another folder.",
    )


def _locked(path: Path, hint: str) -> FileIO:
    """Open and lock the file. Raises ConfigError when another process holds the lock."""
    while True:
        make_own_folder(path.parent, OTHERS_MAY_WRITE, hint)
        stream = open_lock(path)
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = stream.read().decode("ascii", errors="replace").strip()
            stream.close()
            raise _owned(path.parent, owner) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
        stream.close()  # the previous owner removed the file between open and lock: try again
