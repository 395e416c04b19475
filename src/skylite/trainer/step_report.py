"""The trainer's report on a step: trainer_steps/step-000012.json, for which the parent waits."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from skylite.model.process_group import Dist
from skylite.run.files import write_json
from skylite.run.run_dir import RunDir
from skylite.trainer.process_memory import memory_so_far


def write_step_file(
    run: RunDir,
    dist: Dist,
    step: int,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float],
    trained: tuple[float, float],
) -> None:
    """Write the report on rank 0, with the largest memory of any rank. All ranks call it."""
    own = memory_so_far(dist.device)
    largest = torch.tensor(list(own.values()), device=dist.device, dtype=torch.float64)
    memory = dict(zip(own, dist.all_reduce_max_(largest).tolist(), strict=True))
    if dist.is_main:
        body = {
            "step": step,
            "version": step,
            **facts,
            "trained": trained,
            "metrics": {**metrics, **memory},
        }
        write_json(run.trainer_step_path(step), body)
