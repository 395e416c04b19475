"""The preload library that makes system calls fail, and the memory it shares with the test."""

from __future__ import annotations

import ctypes
import errno
import mmap
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

import pytest

SOURCE = Path(__file__).with_name("preload.c")
REFUSE, SHORT = 1, 2
OPEN, WRITE, FSYNC, RENAME, TRUNCATE, MKDIR = 1, 2, 4, 8, 16, 32
ALL = OPEN | WRITE | FSYNC | RENAME | TRUNCATE | MKDIR


class State(ctypes.Structure):
    """`struct state` of preload.c."""

    _fields_ = [
        ("count", ctypes.c_uint64),
        ("target", ctypes.c_uint64),
        ("fired", ctypes.c_uint64),
        ("kind", ctypes.c_uint32),
        ("error", ctypes.c_uint32),
        ("sticky", ctypes.c_uint32),
        ("ops", ctypes.c_uint32),
        ("folder", ctypes.c_char * 4096),
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """How calls fail."""

    kind: int = REFUSE
    error: int = errno.ENOSPC
    sticky: bool = False
    """The target and every call after it: a disk that stays full."""
    ops: int = ALL

    def __str__(self) -> str:
        names = {v: k for k, v in {"open": OPEN, "write": WRITE, "rename": RENAME, "all": ALL}.items()}
        return "-".join(
            [
                "short" if self.kind == SHORT else errno.errorcode[self.error],
                names.get(self.ops, str(self.ops)),
                *(["stays"] if self.sticky else []),
            ]
        )


FAULTS = (
    Fault(sticky=True),
    Fault(error=errno.EIO),
    Fault(error=errno.EACCES, ops=OPEN | MKDIR),
    Fault(error=errno.EACCES, ops=RENAME, sticky=True),
    Fault(kind=SHORT, ops=WRITE, sticky=True),
)


class Layer:
    """The library and its shared state; `env` turns it on in a process."""

    def __init__(self, folder: Path) -> None:
        """Build it in `folder`. Skips the test, saying why, where there is no C compiler."""
        compiler = shutil.which("gcc") or shutil.which("cc") or shutil.which("clang")
        if compiler is None:
            pytest.skip("no C compiler here (gcc, cc, clang): the failing file system cannot be built")
        library = folder / "faults.so"
        subprocess.run(
            [compiler, "-shared", "-fPIC", "-O1", "-Wall", "-o", str(library), str(SOURCE), "-ldl"],
            check=True,
        )
        path = folder / "faults.state"
        path.write_bytes(bytes(ctypes.sizeof(State)))
        self._file = path.open("r+b")
        self._memory = mmap.mmap(self._file.fileno(), ctypes.sizeof(State))
        self.state = State.from_buffer(self._memory)
        self.env = {"LD_PRELOAD": str(library), "FAULT_STATE": str(path)}

    def arm(self, folder: Path, target: int, fault: Fault) -> None:
        """Fail call number `target` (1-based; 0: none, but count) below `folder`."""
        self.state.kind = 0
        self.state.count, self.state.target, self.state.fired = 0, target, 0
        self.state.error, self.state.sticky, self.state.ops = fault.error, fault.sticky, fault.ops
        self.state.folder = str(folder.resolve()).encode()
        self.state.kind = fault.kind

    def disarm(self) -> None:
        """Let everything through, uncounted."""
        self.state.kind = 0
