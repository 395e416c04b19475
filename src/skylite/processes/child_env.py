"""Environment variables of child processes: what they inherit, where their files go, what they preload."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import re
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from skylite.processes.import_path import protected_env
from skylite.processes.private_folders import TemporaryFolder, cache_env
from skylite.processes.reaper import TEMPORARY_FOLDER

LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For processes that torch.distributed connects.

By default gloo listens on the interface of the host name, and NCCL on the fastest interface.
"""
FEW_PRODUCTS = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "256", "LRU_CACHE_CAPACITY": "1"}
"""How many compiled matrix products oneDNN and torch keep on a CPU.

oneDNN compiles a bfloat16 product for each new shape, about 0.5 MB of code. It keeps 1,024 of them, and torch
keeps as many again. A micro-batch has about 85 shapes, so three fit. Without a bound a trainer took 2.2 GiB
after 20 steps (with it 1.8), and the engine 2.7 (with it 2.25).
"""
logger = logging.getLogger(__name__)
_LINK_FOLDERS = ("/tmp", "/dev/shm")
"""Used if the temporary folder has a space in its path."""
INTEL_OPENMP = "libiomp5.so"
# The second library needs the first, but has no search path for it.
TBB_MALLOC = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")


def child_env(added: Mapping[str, str], folder: str) -> dict[str, str]:
    """The environment of a child whose working folder and folder for temporary files is `folder`."""
    return protected_env(
        {
            **absolute_paths(os.environ),
            "PYTHONIOENCODING": "utf-8:backslashreplace",  # no print of half a character may fail
            **added,
            **temporary_env(folder),
            "PWD": folder,
        }
    )


_FOLDER = re.compile(r".*(DIR|HOME|ROOT|FOLDER)")
_MAYBE_PATH = re.compile(r".+_(CACHE|FILE|BUNDLE|PATH)")
_SWITCH = re.compile(r"(?i)\d*|true|false|yes|no|on|off")


def absolute_paths(env: Mapping[str, str]) -> dict[str, str]:
    """`env` with absolute paths where it names folders and files, such as HF_HOME=cache."""
    return {name: os.path.abspath(v) if _is_relative_path(name, v) else v for name, v in env.items()}


def _is_relative_path(name: str, value: str) -> bool:
    if value.startswith(("/", "~", "$")) or ":" in value or _SWITCH.fullmatch(value):
        return False
    may_be = _MAYBE_PATH.fullmatch(name) is not None and ("/" in value or os.path.exists(value))
    return may_be or _FOLDER.fullmatch(name) is not None


def temporary_env(folder: str) -> dict[str, str]:
    """Variables for a child with this temporary folder. What torch compiles stays in the user's cache.

    torch keeps compiled C++ headers below TMPDIR, so each child would compile them again. That is turned off.
    """
    headers = "TORCHINDUCTOR_CPP_CACHE_PRECOMPILE_HEADERS"
    return {
        "TMPDIR": folder,
        TEMPORARY_FOLDER: folder,
        headers: os.environ.get(headers, "0"),
        **cache_env(Path(folder)),
    }


def has_library(*names: str) -> bool:
    """Whether the lib folder of the environment contains all these libraries."""
    return all(_path(name).is_file() for name in names)


def preload_env(names: Sequence[str], base_env: Mapping[str, str], *conflicts: str) -> dict[str, str]:
    """LD_PRELOAD with these libraries in front of those that the user preloads.

    Empty when a library is missing or cannot be named, or LD_PRELOAD already contains one of `conflicts`.
    """
    given = base_env.get("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    if not has_library(*names) or any(name in given for name in conflicts):
        return {}
    libraries = [_without_separators(_path(name)) for name in names]
    if None in libraries:
        return {}
    return {"LD_PRELOAD": ":".join([*map(str, libraries), given]).rstrip(":")}


def _without_separators(library: Path) -> Path | None:
    """The library, or a link to it if its path has a space or colon, at which ld.so splits LD_PRELOAD.

    None if no temporary folder can hold the link; logs that.
    """
    if not _is_split(str(library)):
        return library
    folder = link_folder()
    if folder is None:
        logger.warning(
            f"{library} is not preloaded, because its path has a space or colon, and so has every temporary "
            "folder: children run slower or need more memory. Set TMPDIR to a folder without them."
        )
        return None
    link = folder / library.name
    if not link.is_symlink():
        link.symlink_to(library)
    return link


@functools.cache
def link_folder() -> Path | None:
    """A private folder for links, removed at the end of this process. Its path has no space or colon."""
    for parent in (tempfile.gettempdir(), *_LINK_FOLDERS):
        if not _is_split(parent) and os.access(parent, os.W_OK):
            folder = TemporaryFolder("lib-", Path(parent))
            atexit.register(folder.remove)
            return folder.path
    return None


def _is_split(path: str) -> bool:
    return any(c in path for c in " :\t\n")


def _path(name: str) -> Path:
    return Path(sys.prefix, "lib", name)
