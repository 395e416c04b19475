"""One live run a folder: an advisory lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from io import FileIO
from pathlib import Path

from skylite.errors import ConfigError
from skylite.processes.descriptors import private_file
from skylite.run.files import convert_os_errors

LOCK_NAME = ".skylite.lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Own `folder` while the block runs. Raises ConfigError naming the live owner's pid, WriteFailed.

    The kernel lets go of the lock when the process ends, `kill -9` included, so a file that was left behind locks nothing. Only the
    number in the file is stale then. At the end the file goes, and with it a folder that was made for it and has stayed empty: who is
    refused leaves nothing behind.
    """
    path, is_new = folder / LOCK_NAME, not folder.exists()
    with _locked(path) as stream:
        try:
            with convert_os_errors(path):
                stream.truncate(0)
                stream.write(b"%d\n" % os.getpid())
            yield
        finally:
            with suppress(OSError):  # it locks nothing once this process lets go
                path.unlink()
                if is_new:
                    folder.rmdir()


def _locked(path: Path) -> FileIO:
    """The file, open and locked."""
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
        stream.close()  # its owner removed it between our opening and locking it
