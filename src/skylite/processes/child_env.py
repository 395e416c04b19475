"""Environment variables of child processes: what they inherit, where their files go, what they preload."""

from __future__ import annotations

import logging
import os
import re
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from skylite.processes.import_path import protected_env
from skylite.processes.private_folders import cache_env
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
    libraries = [str(_path(name)) for name in names]
    if any(c in library for library in libraries for c in " :\t\n"):  # where ld.so splits LD_PRELOAD
        logger.warning(
            f"{libraries[0]} is not preloaded, because its path has a space or colon: children run slower or "
            "need more memory. Move the Python environment to a folder without them."
        )
        return {}
    return {"LD_PRELOAD": ":".join([*libraries, given]).rstrip(":")}


def _path(name: str) -> Path:
    return Path(sys.prefix, "lib", name)
