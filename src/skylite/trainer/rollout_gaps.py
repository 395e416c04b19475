"""How far the sampled tokens' logprobs are from the engine's, by depth of context.

The step's first pass scores each token with the adapter version that sampled it. So the gaps are those of a
large canary: other contexts than the fixed one, and longer. rollout/judge_rollouts.py judges them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skylite.config.train import TrainConfig
from skylite.model.process_group import Dist
from skylite.trainer.micro_batches import Table, number_and_place
from skylite.types import IntArray

CLIP = 10.0
"""Gaps count as this many times their mean at most: rounding moves single tokens by a nat or more."""


def why_not_judged(config: TrainConfig) -> str:
    """Why the gaps of this configuration say nothing about the engine; empty if they do."""
    if config.rollout.top_p < 1 or config.rollout.top_k > 0:
        return "rollout.top_p or rollout.top_k cuts the engine's distribution, and not the trainer's"
    return ""


def depth_edges(longest: int) -> list[int]:
    """Where the depths' bins begin: 0, 32, 64, 96, 128, 192, 256, 384, ... up to `longest`."""
    edges, width = [0, 32, 64, 96], 32
    while edges[-1] < longest:
        edges += [4 * width, 6 * width]
        width *= 2
    return edges


def rollout_gaps(
    table: Table, scored: Sequence[tuple[Tensor, Tensor]], step: int, config: TrainConfig, dist: Dist
) -> dict[str, Any]:
    """A row for each depth at which tokens of the version `step` - 1 were sampled. All ranks call it.

    `scored`: (keys [C], trainer - engine [C]) of this rank's micro-batches of the first update.
    """
    keys = _all([k for k, _ in scored], torch.int64, dist)
    gaps = _all([g.double() for _, g in scored], torch.float64, dist)
    if reason := why_not_judged(config):
        return {"not_judged": reason}
    if not len(keys):
        return {"not_judged": "the trainer scores no token without dropout"}
    numbers, places = number_and_place(keys)
    depths, own = np.empty_like(keys), np.zeros(len(keys), dtype=bool)
    for number in np.unique(numbers):
        of_trajectory = numbers == number
        depth, version = _of_tokens(table, int(number))
        depths[of_trajectory] = depth[places[of_trajectory]]
        own[of_trajectory] = version[places[of_trajectory]] == step - 1
    if not own.any():
        return {"not_judged": "an older version than the trainer's sampled this step"}
    return {"bins": _rows(table, depths[own], np.abs(gaps[own]), numbers[own])}


def _of_tokens(table: Table, number: int) -> tuple[IntArray, IntArray]:
    """Depth in the context, and adapter version, of a trajectory's tokens."""
    calls = table.trajectories[number]
    depths = [e.scored for e in calls]
    versions = [np.full(len(e.scored), e.version) for e in calls]
    return np.concatenate(depths), np.concatenate(versions)


def _rows(
    table: Table, depths: IntArray, gaps: npt.NDArray[np.float64], numbers: IntArray
) -> list[dict[str, Any]]:
    clipped = np.minimum(gaps, CLIP * gaps.mean())
    edges = np.array(depth_edges(int(depths.max())))
    places = np.searchsorted(edges, depths, side="right") - 1
    rows = []
    for place in np.unique(places):
        inside = np.flatnonzero(places == place)
        worst = inside[gaps[inside].argmax()]
        rows.append(
            {
                "from": int(edges[place]),
                "tokens": len(inside),
                "gap_mean": float(clipped[inside].mean()),
                "gap_max": float(gaps[worst]),
                "worst_depth": int(depths[worst]),
                "worst_prompt": table.trajectories[int(numbers[worst])][0].prompt_id,
            }
        )
    return rows


def _all(parts: Sequence[Tensor], dtype: torch.dtype, dist: Dist) -> Any:
    """The values of all micro-batches of all ranks."""
    own = torch.cat(list(parts)) if parts else torch.zeros(0, dtype=dtype, device=dist.device)
    return dist.all_gather(own).cpu().numpy()
