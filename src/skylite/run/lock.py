"""An advisory lock that allows one live run per folder; the kernel releases it when the process ends."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from skylite.errors import ConfigError
from skylite.processes.file_descriptors import private_file
from skylite.run.files import convert_os_errors

LOCK_NAME = ".skylite.lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Lock `folder` while the block runs. Raises ConfigError with the pid of the live owner, or WriteFailed.

    The kernel releases the lock even after `kill -9`, so a leftover lock file locks nothing; only its pid is
    stale. At the end the lock file is removed, and the folder too if the lock created it and it is still
    empty.
    """
    path, is_new = folder / LOCK_NAME, not folder.exists()
    with _locked(path) as stream:
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


def _locked(path: Path) -> FileIO:
    """Open and lock the file. Raises ConfigError when another process holds the lock."""
    while True:
        with convert_os_errors(path):
            path.parent.mkdir(parents=True, exist_ok=True)
            stream = private_file(os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW, 0o644), "r+b")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = stream.read().decode("ascii", errors="replace").strip()
            stream.close()
            raise ConfigError(
                f"{path.parent} belongs to another live run (pid {owner or 'unknown'}).",
                "Wait for it, stop it, or choose another folder.",
            ) from None
        with suppress(FileNotFoundError):
            if os.path.samestat(os.fstat(stream.fileno()), path.stat()):
                return stream
        stream.close()  # the previous owner removed the file between open and lock: try again
