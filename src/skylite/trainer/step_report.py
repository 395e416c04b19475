"""The trainer's report on a step: trainer_steps/step-000012.json, for which the parent waits."""

from __future__ import annotations

import resource
from collections.abc import Mapping
from typing import Any

import torch

from skylite.model.process_group import Dist
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir


def write_step_file(
    run: RunDir,
    dist: Dist,
    step: int,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float],
    trained: tuple[float, float],
) -> None:
    """Write the report on rank 0, with the largest resident memory of any rank. All ranks call it."""
    peak = torch.tensor([peak_rss_bytes()], device=dist.device, dtype=torch.float64)
    peak_bytes = float(dist.all_reduce_max_(peak).item())
    if dist.is_main:
        body = {
            "step": step,
            "version": step,
            **facts,
            "trained": trained,
            "metrics": {**metrics, "mem/rss_peak_bytes": peak_bytes},
        }
        write_json(run.trainer_step_path(step), body)


def peak_rss_bytes() -> float:
    """Largest resident memory of this process so far (getrusage counts KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
