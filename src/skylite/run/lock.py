"""One live run a folder: an advisory lock that dies with its process."""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from skylite.errors import ConfigError
from skylite.run.descriptors import private_file
from skylite.run.disk import writing

LOCK_NAME = ".skylite.lock"


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Own `folder` while the block runs. Raises ConfigError naming the live owner's pid, WriteFailed.

    The kernel lets go of the lock when the process ends, `kill -9` included, so a file that was left behind locks nothing. Only the
    number in the file is stale then.
    """
    path = folder / LOCK_NAME
    with writing(path):
        folder.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o644)
    with private_file(descriptor, "r+b") as stream:
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            owner = stream.read().decode("ascii", errors="replace").strip()
            raise ConfigError(
                f"{folder} belongs to another live run (pid {owner or 'unknown'}).", "Wait for it, stop it, or choose another folder."
            ) from None
        with writing(path):
            stream.truncate(0)
            stream.write(b"%d\n" % os.getpid())
        yield
