"""Shared libraries from pip packages of this Python environment, preloaded by child processes."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

INTEL_OPENMP = "libiomp5.so"
# The second library needs the first, but has no search path for it.
TBB_MALLOC = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")


def has_library(*names: str) -> bool:
    """Whether the lib folder of the environment contains all these libraries."""
    return all(_path(name).is_file() for name in names)


def preload_env(names: Sequence[str], base_env: Mapping[str, str], *conflicts: str) -> dict[str, str]:
    """LD_PRELOAD with these libraries in front of those that the user preloads.

    Empty when a library is missing, or when LD_PRELOAD already contains one of `conflicts`.
    """
    given = base_env.get("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    if not has_library(*names) or any(name in given for name in conflicts):
        return {}
    return {"LD_PRELOAD": ":".join([*(str(_path(name)) for name in names), given]).rstrip(":")}


def _path(name: str) -> Path:
    return Path(sys.prefix, "lib", name)
