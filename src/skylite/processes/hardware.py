"""Cores, memory, device and compute type of this machine, without importing torch."""

from __future__ import annotations

import math
import os
from pathlib import Path
from typing import Literal

from skylite.errors import ConfigError
from skylite.notes import Note, warning
from skylite.processes.cuda_check import check_cuda
from skylite.processes.gpus import USE_CPU, VISIBLE, visible_gpus

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]

CPUINFO = Path("/proc/cpuinfo")
MEMINFO = Path("/proc/meminfo")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86 and Arm flags of the instructions for fast bfloat16 matrix products."""
BF16_CAPABILITY = 8.0
"""Minimum CUDA compute capability for bfloat16 in the engines (Ampere)."""
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of processes that torch.distributed connects.

By default gloo listens on the interface of the host name, and NCCL on the fastest interface.
"""


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


def available_memory(meminfo: Path = MEMINFO) -> int:
    """Bytes that processes can still allocate without swapping, within the container's limit."""
    line = next(x for x in meminfo.read_text().splitlines() if x.startswith("MemAvailable:"))
    return min(int(line.split()[1]) * 1024, total_memory())


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
    setting: Literal["auto", "bfloat16", "float32"], device: Device, *, lora: bool = True
) -> tuple[Dtype, Note | None]:
    """The compute dtype, and a note on an automatic choice or a slow setting (None for another setting).

    `lora`: the engine serves adapters. Raises ConfigError for a type that it does not compute on this GPU.
    """
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
