"""What a process of the sandbox does to itself before it runs untrusted code. It cannot be undone.

Landlock (landlock(7), Linux 5.13) limits files, seccomp (seccomp.py) system calls. Neither needs privileges.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import struct
import sys
from collections.abc import Sequence
from dataclasses import dataclass
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
_EXECUTE, _WRITE_FILE, _READ_FILE, _READ_DIR = 1, 2, 4, 8
_TRUNCATE = 1 << 14
_FILES = _EXECUTE | _WRITE_FILE | _READ_FILE | _TRUNCATE
_READ = _READ_FILE | _READ_DIR
_NO_SPECIAL_FILES = ~((1 << 6) | (1 << 9) | (1 << 11))  # no character device, socket or block device
OLDEST_FOR_WRITING = 3
"""The first version (Linux 6.2) that covers truncation. Older ones only limit what may be read."""
_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18
_ENTRY_BYTES = 4096


@dataclass(frozen=True, slots=True)
class Protection:
    """What this kernel and container offer. Without one of them, code in the sandbox may do less."""

    landlock: int
    """Its version. 0: everything that the user may read can be read."""
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


def limit_call(address_space: int, file_bytes: int, protection: Protection) -> None:
    """Limit the process of calls: one process, memory, files. Both are sizes in bytes; that of one file."""
    lower_limit(resource.RLIMIT_AS, address_space, address_space)
    lower_limit(resource.RLIMIT_FSIZE, file_bytes, file_bytes)
    lower_limit(resource.RLIMIT_NOFILE, OPEN_FILES, OPEN_FILES)
    arch = architecture()
    assert arch is not None, "isolate has checked it"
    install(single_process_filter(arch, os.getpid(), may_delete=protection.has_bounded_folder))


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


def mount_bounded(folder: Path, most: int) -> bool:
    """Mount a memory file system of limited size on `folder`, seen by this process and its children only.

    It also limits deleted files that are still open or mapped. Returns False where the machine forbids it.

    most: size in bytes. The process must have one thread.
    """
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.unshare(_NEW_MOUNTS) != 0:
        user, group = os.getuid(), os.getgid()
        if libc.unshare(_NEW_MOUNTS | _NEW_USER) != 0:
            return False
        maps = {"setgroups": "deny", "uid_map": f"{user} {user} 1", "gid_map": f"{group} {group} 1"}
        with contextlib.suppress(OSError):
            for name, text in maps.items():
                Path("/proc/self", name).write_text(text)
    if libc.mount(None, b"/", None, _RECURSIVE | _PRIVATE, None) != 0:  # nothing of it reaches the machine
        return False
    options = f"size={most},nr_inodes={most // _ENTRY_BYTES + 16},mode=700".encode()
    flags = _NO_SETUID | _NO_DEVICES | _NO_PROGRAMS
    return bool(libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", flags, options) == 0)


def landlock_version() -> int:
    """The version of Landlock that this kernel offers; 0 without it."""
    version: int = _libc().syscall(_CREATE, None, 0, _VERSION)
    return max(0, version)


def restrict(version: int, readable: Sequence[Path], writable: Sequence[Path]) -> None:
    """Leave this process nothing but these files and folders. It cannot be undone.

    No program may be executed. Paths that do not exist are left out. Raises OSError if the kernel refuses.
    """
    rights = (1 << {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)) - 1
    # struct landlock_ruleset_attr: files, TCP (bind, connect), scopes (abstract sockets, signals).
    fields = [rights, *([3] if version >= 4 else []), *([3] if version >= 6 else [])]
    attributes = struct.pack(f"={len(fields)}Q", *fields)
    ruleset = _check(_libc().syscall(_CREATE, attributes, len(attributes), 0), "landlock_create_ruleset")
    try:
        for path in readable:
            _allow(ruleset, path, _READ)
        for path in writable:
            _allow(ruleset, path, rights & _NO_SPECIAL_FILES & ~_EXECUTE)
        _check(_libc().prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0), "prctl(PR_SET_NO_NEW_PRIVS)")
        _check(_libc().syscall(_RESTRICT, ruleset, 0), "landlock_restrict_self")
    finally:
        os.close(ruleset)


def _allow(ruleset: int, path: Path, rights: int) -> None:
    try:
        descriptor = os.open(path, os.O_PATH | os.O_CLOEXEC)
    except OSError:
        return
    try:
        rule = struct.pack("=Qi", rights if path.is_dir() else rights & _FILES, descriptor)
        _check(_libc().syscall(_ADD_RULE, ruleset, _PATH_BENEATH, rule, 0), f"landlock_add_rule for {path}")
    finally:
        os.close(descriptor)


def _libc() -> ctypes.CDLL:
    return ctypes.CDLL(None, use_errno=True)


def _check(result: int, what: str) -> int:
    if result < 0:
        raise OSError(ctypes.get_errno(), f"{what} failed")
    return result
