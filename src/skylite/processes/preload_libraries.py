"""Shared libraries from pip packages of this Python environment, preloaded by child processes."""

from __future__ import annotations

import atexit
import functools
import logging
import os
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

from skylite.processes.temporary_folder import TemporaryFolder

logger = logging.getLogger(__name__)
_LINK_FOLDERS = ("/tmp", "/dev/shm")
"""Used if the temporary folder has a space in its path."""
INTEL_OPENMP = "libiomp5.so"
# The second library needs the first, but has no search path for it.
TBB_MALLOC = ("libtbbmalloc.so.2", "libtbbmalloc_proxy.so.2")


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
