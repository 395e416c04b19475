"""Detect cores, memory, GPUs and bfloat16 support of this machine, without importing torch."""

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
"""x86 and Arm flags of the instructions for fast bfloat16 matrix products."""
BF16_CAPABILITY = 8.0
"""Minimum CUDA compute capability for bfloat16 in vLLM (Ampere)."""
SMI_TIMEOUT_S = 30.0
"""A cold driver takes several seconds to answer."""
LOOPBACK_ONLY = {"GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
"""Environment of processes that torch.distributed connects.

By default gloo listens on the interface of the host name, and NCCL on the fastest interface.
"""


@dataclass(frozen=True, slots=True)
class Gpu:
    """A GPU as listed by nvidia-smi."""

    index: int
    uuid: str
    name: str
    compute_capability: float


def cpu_cores() -> int:
    """Cores this process may use: its CPU affinity or the container quota, whichever is less."""
    return max(1, min(len(os.sched_getaffinity(0)), _quota_cores(CGROUP_CPU)))


def total_memory() -> int:
    """Bytes of memory of this machine, or the container limit if that is less."""
    machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    limit = CGROUP_MEMORY.read_text().strip() if CGROUP_MEMORY.is_file() else "max"
    return machine if limit == "max" else min(machine, int(limit))


def gpus() -> list[Gpu]:
    """GPUs this process may use (respects CUDA_VISIBLE_DEVICES); empty without a working nvidia-smi."""
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
    """Parse nvidia-smi lines such as `0, GPU-3f..., NVIDIA H200, 9.0`."""
    rows = [[cell.strip() for cell in line.split(",")] for line in listing.splitlines() if line.strip()]
    return [Gpu(int(index), uuid, name, float(capability)) for index, uuid, name, capability in rows]


def visible_gpus(found: list[Gpu], setting: str | None) -> list[Gpu]:
    """GPUs that CUDA_VISIBLE_DEVICES (`setting`) selects, in its order.

    Like CUDA, ignores all entries after the first unknown one.
    """
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
    """cuda if there is a GPU and torch is a CUDA build, else cpu."""
    return "cuda" if _torch_has_cuda() and gpus() else "cpu"


def choose_dtype(setting: Literal["auto", "bfloat16", "float32"], device: Device) -> tuple[Dtype, str]:
    """The compute dtype, and notes for the user on an automatic choice or a poor setting (empty if none)."""
    notes = []
    if device == "cpu" and not _torch_has_cuda() and (unused := gpus()):
        notes.append(
            f"warning: {unused[0].name} is not used, because this Python has the CPU build of torch; "
            "`make setup` installs the CUDA build"
        )
    slow = _why_bf16_is_slow(device)
    dtype: Dtype = ("float32" if slow else "bfloat16") if setting == "auto" else setting
    if slow and setting == "auto":
        notes.append(f"dtype float32: {slow}")
    if slow and setting == "bfloat16":
        notes.append(f"warning: dtype is bfloat16, but {slow}; float32 is several times faster here")
    return dtype, "; ".join(notes)


def _why_bf16_is_slow(device: Device) -> str:
    if device == "cpu":
        return "" if cpu_has_bf16() else "this CPU has no bfloat16 instructions"
    old = next((g for g in gpus() if g.compute_capability < BF16_CAPABILITY), None)
    return f"{old.name} has no bfloat16 instructions" if old is not None else ""


def _torch_has_cuda() -> bool:
    """Read it from the version: CPU wheels have a local part, as in 2.13.0+cpu."""
    return not metadata.version("torch").endswith("+cpu")


def _quota_cores(path: Path) -> int:
    """Cores of a cgroup v2 quota such as `150000 100000`, rounded up (1.5 -> 2); else all cores."""
    quota, _, period = path.read_text().partition(" ") if path.is_file() else ("max", "", "")
    return os.cpu_count() or 1 if quota.strip() == "max" else math.ceil(int(quota) / int(period))
