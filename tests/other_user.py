"""Another user of the machine, for tests that run as root."""

from __future__ import annotations

import ctypes
import os
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from traceback import print_exc

import pytest

OTHER = 65533
PR_SET_DUMPABLE = 4
as_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can act as another user")


def as_other_user(action: Callable[[], object]) -> int:
    """Run it as another user, in a forked child. Returns 0, or 1 after an exception, which it prints."""
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            os.setgroups([])
            os.setgid(OTHER)
            os.setuid(OTHER)
            ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 1, 0, 0, 0)  # as after the start of a program
            action()
            code = 0
        except BaseException:  # noqa: BLE001 a forked child must not return into pytest
            print_exc()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


@contextmanager
def folder_of_all() -> Iterator[Path]:
    """A sticky folder in which every user may write. Like pytest's, /tmp may be closed to others."""
    with tempfile.TemporaryDirectory(prefix="t-", dir="/dev/shm") as folder:
        os.chmod(folder, 0o1777)
        yield Path(folder)
