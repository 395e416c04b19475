"""A machine with any GPUs: a stub nvidia-smi on PATH, and a stub torch for the child that asks it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path

import pytest

from skylite.engine import tensor_parallel
from skylite.processes import gpus
from tests.decisions import resolved

H200 = "NVIDIA H200, 9.0, 143771, 580.95.05, Disabled"
T4 = "Tesla T4, 7.5, 15360, 580.95.05, [N/A]"
RESOLVED = resolved(
    Path("model"),
    Path("adapters"),
    placement={"device": "cuda", "dtype": "bfloat16", "rank_gpus": [0], "engine_gpus": [1, 0]},
)
SMI = """#!/bin/sh
here=$(dirname "$0")
case "$*" in
    *memory.used*) for a in "$@"; do case "$a" in GPU-*) cat "$here/use-$a" ;; esac; done ;;
    *compute-apps*) cat "$here/processes" ;;
    *) cat "$here/gpus"; exit {code} ;;
esac
"""
TORCH = """
__version__ = {version!r}
class version:
    cuda = {cuda!r}
class cuda:
    def init():
        if {error!r}:
            raise RuntimeError({error!r})
    def device_count():
        import os
        return len(os.environ["CUDA_VISIBLE_DEVICES"].split(","))
    def get_arch_list():
        return ["sm_75", "sm_80", "sm_90", "compute_90"]
"""


class Machine:
    """What nvidia-smi and torch of this test say. Without a call, the machine has no nvidia-smi."""

    def __init__(self, folder: Path, patch: pytest.MonkeyPatch) -> None:
        self.folder, self.patch = folder, patch
        patch.delenv(gpus.VISIBLE, raising=False)
        patch.setattr(gpus, "DRIVER_DEVICE", folder / "nvidiactl")
        patch.setattr(tensor_parallel, "SHARED_MEMORY", folder / "shm")
        patch.setattr(gpus, "SMI", str(folder / "nvidia-smi"))

    def lists(
        self,
        *cards: str,
        used_mib: int | Sequence[int] = 4,
        reserved_mib: int = 0,
        processes: Sequence[str] = (),
        text: str = "",
        code: int = 0,
    ) -> None:
        """nvidia-smi lists these GPUs, or prints `text` and exits with `code`."""
        rows = []
        used = [used_mib] * len(cards) if isinstance(used_mib, int) else used_mib
        self.folder.mkdir(exist_ok=True)
        for index, card in enumerate(cards):
            name, _, rest = card.partition(", ")
            rows.append(f"{index}, GPU-{index}a5e-11, {name}, {rest}\n")
            total = rest.split(", ")[1]
            free = int(total) - used[index] - reserved_mib if total.isdigit() else "[N/A]"
            (self.folder / f"use-GPU-{index}a5e-11").write_text(f"{used[index]}, {free}\n")
        (self.folder / "gpus").write_text("".join(rows) or text)
        (self.folder / "processes").write_text("".join(f"{line}\n" for line in processes))
        (self.folder / "nvidia-smi").write_text(SMI.format(code=code))
        (self.folder / "nvidia-smi").chmod(0o755)
        self.patch.setenv("PATH", f"{self.folder}:{os.environ['PATH']}")
        gpus._ask_smi_once.cache_clear()

    def has_torch(self, version: str = "2.13.0", cuda: str | None = "13.0", error: str = "") -> None:
        """The child finds this torch. It sees as many GPUs as CUDA_VISIBLE_DEVICES names."""
        package = self.folder / "packages" / "torch"
        package.mkdir(parents=True, exist_ok=True)
        (package / "__init__.py").write_text(TORCH.format(version=version, cuda=cuda, error=error))
        self.patch.setenv("PYTHONPATH", str(package.parent))
        gpus.ask_torch.cache_clear()

    def sees(self, setting: str) -> None:
        """CUDA_VISIBLE_DEVICES."""
        self.patch.setenv(gpus.VISIBLE, setting)
