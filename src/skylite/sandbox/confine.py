"""What a process of the sandbox does to itself before it runs untrusted code. It cannot be undone.

Landlock (landlock(7), Linux 5.13) limits files, seccomp (seccomp.py) system calls. Neither needs privileges.
"""

from __future__ import annotations

import ctypes
import os
import resource
import struct
import sys
from collections.abc import Sequence
from pathlib import Path

from skylite.sandbox.seccomp import architecture, install, isolation_filter, single_process_filter

OPEN_FILES = 64
SETUP_BYTES = 16 << 30
"""Address space of the server, which only runs code of installed packages."""
_SYSTEM_PATHS = (
    "/usr", "/lib", "/lib64", "/bin", "/etc/ld.so.cache", "/etc/localtime", "/dev/null", "/dev/zero",
    "/dev/random", "/dev/urandom", "/proc/cpuinfo", "/proc/meminfo", "/sys/devices/system/cpu",
)  # fmt: skip
_CAPABILITIES_VERSION_3 = 0x20080522
_CREATE, _ADD_RULE, _RESTRICT = 444, 445, 446
_VERSION = 1
_PR_SET_NO_NEW_PRIVS = 38
_PATH_BENEATH = 1
_READ_FILE, _READ_DIR = 4, 8


def isolate(readable: Sequence[Path]) -> None:
    """Cut this process and its children off: no network, no other processes, no program, no file to write.

    Reading is limited to Python, the system's libraries and `readable`, if the kernel has Landlock.
    Raises OSError if the kernel cannot do it.
    """
    arch = architecture()
    if arch is None:
        raise OSError(0, f"skylite knows no seccomp filter for {os.uname().machine}")
    drop_capabilities()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if version := landlock_version():
        restrict_reading(version, [*_python_paths(), *readable])
    install(isolation_filter(arch))


def limit_call(address_space: int) -> None:
    """Limit the process of calls: one process, memory (in bytes), files."""
    lower_limit(resource.RLIMIT_AS, address_space, address_space)
    lower_limit(resource.RLIMIT_FSIZE, 0, 0)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)
    arch = architecture()
    assert arch is not None, "isolate has checked it"
    install(single_process_filter(arch, os.getpid()))


def limit_cpu(soft: int, hard: int | None = None) -> None:
    """Limit the CPU seconds of this process."""
    lower_limit(resource.RLIMIT_CPU, soft, hard)


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


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 without it."""
    version: int = _libc().syscall(_CREATE, None, 0, _VERSION)
    return max(0, version)


def restrict_reading(version: int, readable: Sequence[Path]) -> None:
    """Leave this process nothing but reading these files and folders. It cannot be undone.

    Paths that do not exist are left out. Raises OSError if the kernel refuses.
    """
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # struct landlock_ruleset_attr: files, TCP (bind, connect), scopes (abstract sockets, signals).
    fields = [rights, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _check(_libc().syscall(_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for path in readable:
            _allow_reading(ruleset, path)
        _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(_libc().syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow_reading(ruleset: int, path: Path) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = struct.pack("=Qi", _READ_FILE | _READ_DIR if path.is_dir() else _READ_FILE, descriptor)
        _check(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}")
    finally:
        os.close(descriptor)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what} failed")
    return result
