"""What this machine has: cores, GPUs, bf16 instructions. Asked without importing torch."""

from __future__ import annotations

import math
import os
import shutil
import subprocess
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Literal

Device = Literal["cpu", "cuda"]
Dtype = Literal["bfloat16", "float32"]

CPUINFO = Path("/proc/cpuinfo")
CGROUP_CPU = Path("/sys/fs/cgroup/cpu.max")
CGROUP_MEMORY = Path("/sys/fs/cgroup/memory.max")
BF16_FLAGS = frozenset({"avx512_bf16", "amx_bf16", "bf16"})
"""x86 and Arm names of the instructions that make bfloat16 products fast on a CPU."""
BF16_CAPABILITY = 8.0
"""CUDA compute capability from which on vLLM takes bfloat16 (Ampere)."""
SMI_TIMEOUT_S = 30.0
"""A cold driver takes several seconds to answer."""
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""For processes that torch joins: left alone it listens on the interface that the machine's name leads to, and NCCL on the fastest."""


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU as nvidia-smi lists it."""

    index: int
    uuid: str
    name: str
    compute_capability: float


def cpu_cores() -> int:
    """Cores this process may use: its affinity, or a container's quota where that is less."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota_cores(CGROUP_CPU)))


def total_memory() -> int:
    """Bytes of memory this machine has, or a container's limit where that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_MEMORY.read_text().strip() if CGROUP_MEMORY.is_file() else "max"
    return machine if limit == "max" else min(machine, int(limit))


def gpus() -> list[Gpu]:
    """GPUs this process may use (CUDA_VISIBLE_DEVICES applies); empty without a working nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return []
    query = ["nvidia-smi", "--query-gpu=index,uuid,name,compute_cap", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, text=True, check=False, timeout=SMI_TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return []
    if done.returncode != 0:
        return []
    return visible_gpus(parse_gpus(done.stdout), os.environ.get("CUDA_VISIBLE_DEVICES"))


def parse_gpus(listing: str) -> list[Gpu]:
    """nvidia-smi's lines `0, GPU-3f..., NVIDIA H200, 9.0`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    return [Gpu(int(index), uuid, name, float(capability)) for index, uuid, name, capability in rows]


def visible_gpus(found: list[Gpu], setting: str | None) -> list[Gpu]:
    """Those that CUDA_VISIBLE_DEVICES leaves, in its order; like CUDA, names after the first unknown one do not count."""
    if setting is None:
        return found
    chosen: list[Gpu] = []
    for name in (part.strip() for part in setting.split(",")):
        match = [
            g for g in found if name == str(g.index) or (name.startswith("GPU-") and g.uuid.startswith(name))
        ]
        if not match:
            break
        chosen += match
    return chosen


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
    """cuda where there is a GPU and torch is built for it, else cpu."""
    return "cuda" if _torch_has_cuda() and gpus() else "cpu"


def choose_dtype(setting: Literal["auto", "bfloat16", "float32"], device: Device) -> tuple[Dtype, str]:
    """The compute type and, where something was chosen for the user or is a bad idea, why in words."""
    notes = []
    if device == "cpu" and not _torch_has_cuda() and (unused := gpus()):
        notes.append(
            f"warning: {unused[0].name} is not used, because this Python has the CPU build of torch; `make setup` installs the other"
        )
    slow = _why_bf16_is_slow(device)
    dtype: Dtype = ("float32" if slow else "bfloat16") if setting == "auto" else setting
    if slow and setting == "auto":
        notes.append(f"computing in float32: {slow}")
    if slow and setting == "bfloat16":
        notes.append(f"warning: bfloat16 was asked for, but {slow}; float32 is several times faster here")
    return dtype, "; ".join(notes)


def _why_bf16_is_slow(device: Device) -> str:
    if device == "cpu":
        return "" if cpu_has_bf16() else "this CPU has no bfloat16 instructions"
    old = next((g for g in gpus() if g.compute_capability < BF16_CAPABILITY), None)
    return f"{old.name} has no bfloat16 instructions" if old is not None else ""


def _torch_has_cuda() -> bool:
    """By the version's local part: wheels without CUDA are called 2.13.0+cpu."""
    return not metadata.version("torch").endswith("+cpu")


def _quota_cores(path: Path) -> int:
    """Whole cores of a cgroup v2 quota such as `150000 100000` (1.5 cores are 2); the machine's without one."""
    quota, _, period = path.read_text().partition(" ") if path.is_file() else ("max", "", "")
    return os.cpu_count() or 1 if quota.strip() == "max" else math.ceil(int(quota) / int(period))
