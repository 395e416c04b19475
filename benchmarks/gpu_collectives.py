"""Part of `make gpu-check` that starts the trainer's process group, before a run depends on it."""

from __future__ import annotations

import os
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING

import gpu_train

if TYPE_CHECKING:
    from gpu_check import Report

TORCHRUN = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
COUNT = 1 << 20


def collectives(report: Report) -> None:
    """The group of one rank as the trainer makes it, and a sum over it: NCCL on a GPU, else gloo.

    Raises RuntimeError if the sum is wrong.
    """
    gpu_train.use_trainer_environment()
    os.environ.update(TORCHRUN, TORCHELASTIC_RUN_ID="gpu-check")
    import torch

    from skylite.model.process_group import process_group

    on_gpu = torch.cuda.is_available()
    started = time.perf_counter()
    with (
        tempfile.TemporaryDirectory(prefix="skylite-") as folder,
        process_group("cuda" if on_gpu else "cpu", Path(folder)) as dist,
    ):
        report.put("backend", torch.distributed.get_backend())
        if on_gpu:
            report.put("nccl", torch.cuda.nccl.version())  # type: ignore[no-untyped-call]
        values = torch.ones(COUNT, device=dist.device)
        report.put("memory_before", gpu_train.memory_of(dist.device))
        total = float(dist.all_reduce_sum_(values).sum())
        report.put("seconds", round(time.perf_counter() - started, 3))
        report.put("memory_after", gpu_train.memory_of(dist.device))
    if total != COUNT:
        raise RuntimeError(f"the sum over one rank is {total}, not {COUNT}")
