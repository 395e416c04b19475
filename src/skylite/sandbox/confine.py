"""What a process of the sandbox does to itself before it runs untrusted code. It cannot be undone."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from skylite.sandbox.landlock import OLDEST_FOR_WRITING, landlock_version, restrict
from skylite.sandbox.seccomp import architecture, install, isolation_filter, single_process_filter

OPEN_FILES = 64
SETUP_BYTES = 16 << 30
"""Address space of the server, which only runs code of installed packages."""
_SYSTEM_PATHS = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero",
    "/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1
_CAPABILITIES_VERSION_3 = 0x20080522


@dataclass(frozen=True, slots=True)
class Protection:
    """What this kernel and container offer. Without one of them, code in the sandbox may do less."""

    landlock: int
    """Its version. 0: everything that the user may read can be read."""
    counts_threads: bool
    """False: calls start no threads."""
    has_bounded_folder: bool
    """The scratch folder is a file system of limited size. False: no file can be deleted or renamed in it."""


def isolate(readable: Sequence[Path], scratch: Path | None) -> None:
    """Cut this process and its children off: no network, no other processes, no program, no writing but in
    `scratch`.

    Reading is limited to Python, the system's libraries and `readable`, if the kernel has Landlock.
    Raises OSError if the kernel cannot do it.
    """
    arch, version = architecture(), landlock_version()
    if arch is None:
        raise OSError(0, f"skylite knows no seccomp filter for {os.uname().machine}")
    if scratch is not None and version < OLDEST_FOR_WRITING:
        raise OSError(0, "a folder to write in needs Landlock 3 (Linux 6.2)")
    drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if version:
        restrict(version, [*_python_paths(), *readable], [] if scratch is None else [scratch])
    install(isolation_filter(arch, may_write=scratch is not None))


def limit_call(server: int, memory_bytes: int, cpu_s: int, file_bytes: int, protection: Protection) -> None:
    """Limit the process of one call: one process, memory, CPU time, files. `server`: its parent's id.

    memory_bytes: address space, in bytes. file_bytes: the largest file that it may write.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")
    if os.getppid() != server:
        os._exit(1)
    lower_limit(resource.RLIMIT_AS, memory_bytes, memory_bytes)
    lower_limit(resource.RLIMIT_CPU, cpu_s, cpu_s + 1)  # SIGXCPU, which can be ignored, then SIGKILL
    lower_limit(resource.RLIMIT_FSIZE, file_bytes, file_bytes)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)
    arch = architecture()
    assert arch is not None, "isolate has checked it"
    install(
        single_process_filter(
            arch,
            os.getpid(),
            may_start_threads=protection.counts_threads,
            may_delete=protection.has_bounded_folder,
        )
    )


def lower_limit(kind: int, soft: int, hard: int | None = None) -> None:
    """Lower a limit of this process. A lower hard limit stays. `hard`: None leaves it."""
    most = resource.getrlimit(kind)[1]
    if most == resource.RLIM_INFINITY:
        resource.setrlimit(kind, (soft, most if hard is None else hard))
    else:
        resource.setrlimit(kind, (min(soft, most), most if hard is None else min(hard, most)))


def drop_capabilities() -> None:
    """Give up the privileges of root, if this is root."""
    header = struct.pack("=Ii", _CAPABILITIES_VERSION_3, 0)
    none = bytes(24)
    if ctypes.CDLL(None, use_errno=True).capset(header, none) != 0:
        raise OSError(ctypes.get_errno(), "capset failed")


def _python_paths() -> list[Path]:
    """Files and folders that imports need."""
    libraries = [p for p in os.environ.get("LD_LIBRARY_PATH", "").split(":") if p]
    found = [*sys.path, sys.prefix, sys.base_prefix, *_SYSTEM_PATHS, *libraries]
    return [Path(p) for p in dict.fromkeys(found) if os.path.isabs(p)]
