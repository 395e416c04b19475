"""Gives a CPU build of torch a CUDA device without memory, before torch is imported.

FakeTensorMode needs no GPU for CUDA tensors, but autograd needs a device guard and CUDA hooks, which only
CUDA builds have. fake_cuda.cpp adds both. torch looks for them once, while it is imported: so run

    python -m pytest -p tests.fake_gpu.preload ...

or call `preload()` first. It does nothing for a CUDA build, whose own guard and hooks need a GPU.
"""

from __future__ import annotations

import ctypes
import hashlib
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

SOURCE = Path(__file__).with_name("fake_cuda.cpp")
COMPILER = os.environ.get("CXX", "g++")


def torch_folder() -> Path:
    """Where torch is installed."""
    spec = importlib.util.find_spec("torch")
    assert spec is not None
    assert spec.submodule_search_locations is not None
    return Path(spec.submodule_search_locations[0])


def is_cpu_build() -> bool:
    return not (torch_folder() / "lib" / "libtorch_cuda.so").exists()


def has_compiler() -> bool:
    return shutil.which(COMPILER) is not None


def preload() -> None:
    """Build and load fake_cuda.cpp. Raises RuntimeError if torch is imported already."""
    if not is_cpu_build():
        return
    if "torch" in sys.modules:
        raise RuntimeError("tests.fake_gpu.preload comes too late: torch is imported already")
    built = build()
    for library in ("libc10.so", "libtorch_cpu.so"):
        ctypes.CDLL(str(torch_folder() / "lib" / library), mode=ctypes.RTLD_GLOBAL)
    ctypes.CDLL(str(built), mode=ctypes.RTLD_GLOBAL)


def build() -> Path:
    """The compiled library, from a cache in the temporary folder that belongs to this user."""
    key = hashlib.sha256(SOURCE.read_bytes() + f"{version('torch')} {sys.executable}".encode()).hexdigest()
    folder = Path(tempfile.gettempdir(), f"skylite-fake-cuda-{os.getuid()}")
    folder.mkdir(mode=0o700, exist_ok=True)
    if folder.stat().st_uid != os.getuid():
        raise PermissionError(f"{folder} belongs to another user; delete it.")
    library = folder / f"{key[:16]}.so"
    if not library.exists():
        flags, libraries = [COMPILER, "-std=c++20", "-shared", "-fPIC"], ["-lc10", "-ltorch_cpu"]
        torch, new = torch_folder(), library.with_suffix(f".{os.getpid()}")
        subprocess.run(
            [*flags, f"-I{torch / 'include'}", str(SOURCE), f"-L{torch / 'lib'}", *libraries, "-o", str(new)],
            check=True,
        )
        new.replace(library)
    return library
