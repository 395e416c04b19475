"""Shared libraries that pip brought into this Python environment, for children to preload."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

INTEL_OPENMP = "libiomp5.so"
# The second needs the first and does not say where to find it.
TBB_MALLOC = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")


def has_library(*names: str) -> bool:
    """Whether the environment's lib folder holds all of them."""
    return all(_path(name).is_file() for name in names)


def preload_env(names: Sequence[str], base_env: Mapping[str, str], *rivals: str) -> dict[str, str]:
    """LD_PRELOAD with these libraries of the environment in front of what the user preloads.

    Nothing where one is missing, or where the user preloads one of `rivals`.
    """
    given = base_env.get("LD_PRELOAD", os.environ.get("LD_PRELOAD", ""))
    if not has_library(*names) or any(rival in given for rival in rivals):
        return {}
    return {"LD_PRELOAD": ":".join([*(str(_path(name)) for name in names), given]).rstrip(":")}


def _path(name: str) -> Path:
    return Path(sys.prefix, "lib", name)
