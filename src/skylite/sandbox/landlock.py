"""Landlock: what sandboxed code may read and write (landlock(7), Linux 5.13). Needs no privileges."""

from __future__ import annotations

import ctypes
import os
import struct
from collections.abc import Sequence
from pathlib import Path

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
