"""What Triton needs to compile the launchers of its kernels, which it does at run time."""

from __future__ import annotations

import os
import shutil
import sys
import sysconfig
from pathlib import Path

from skylite.notes import Note, warning

PYTHON_PACKAGE = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"


def c_compiler() -> str | None:
    """The path of the compiler that Triton would run: CC, else gcc, else clang."""
    chosen = os.environ.get("CC")
    return shutil.which(chosen) if chosen else shutil.which("gcc") or shutil.which("clang")


def python_header() -> Path | None:
    """Python.h of this Python; None if its development files are not installed."""
    # Debian's own scheme posix_local names a folder that holds no headers.
    scheme = "posix_prefix" if sysconfig.get_default_scheme() == "posix_local" else None
    paths = sysconfig.get_paths(scheme) if scheme else sysconfig.get_paths()
    header = Path(paths["include"], "Python.h")
    return header if header.exists() else None


def missing_for_triton() -> tuple[str, str] | None:
    """What Triton lacks on this machine, and the command that installs it. None if it lacks nothing."""
    found = {("C compiler", "gcc"): c_compiler(), ("Python.h", PYTHON_PACKAGE): python_header()}
    missing = [names for names, path in found.items() if path is None]
    if not missing:
        return None
    lacking = " and no ".join(what for what, _ in missing)
    return (
        f"there is no {lacking}, and Triton compiles launchers of GPU kernels at run time; "
        "only those in its cache work",
        f"sudo apt-get install {' '.join(package for _, package in missing)}",
    )


def triton_note(device: str) -> Note | None:
    """A warning for the plan of a run; None on a CPU and if nothing is missing."""
    missing = missing_for_triton() if device == "cuda" else None
    return None if missing is None else warning(f"{missing[0]}: `{missing[1]}`")
