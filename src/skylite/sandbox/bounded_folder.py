"""A memory file system of limited size for the scratch folder, seen by the processes of one sandbox only.

It also limits files that are deleted but still open or mapped. Imports only the standard library.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
from pathlib import Path

_NEW_MOUNTS, _NEW_USER = 0x00020000, 0x10000000
_NO_SETUID, _NO_DEVICES, _NO_PROGRAMS = 2, 4, 8
_RECURSIVE, _PRIVATE = 1 << 14, 1 << 18
_ENTRY_BYTES = 4096


def mount_bounded(folder: Path, most: int) -> bool:
    """Mount it on `folder`, as root or in a new user namespace. Returns False where this machine forbids it.

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
