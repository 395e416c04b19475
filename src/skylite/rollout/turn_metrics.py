"""Metrics of trajectories with several turns."""

from __future__ import annotations

import statistics
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from skylite.types import Trajectory

TokenArray = npt.NDArray[np.int64]


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, tokens that calls share, and trajectories that a limit ended.

    `turns/reused_frac`: share of the later prompts' tokens that begin an earlier call of the trajectory.
    `turns/branches_mean`: later calls per trajectory whose prompt does not contain a complete earlier call.
    `turns/rerendered_tokens`: tokens per trajectory that these calls render again: after the longest common
    prefix with an earlier call, and before the end of that call.
    """
    prompt_tokens, reused_tokens, branches, rerendered_tokens = 0, 0, 0, 0
    for trajectory in trajectories:
        earlier: list[TokenArray] = []
        for call in trajectory.calls:
            prompt = np.asarray(call.prompt_token_ids, dtype=np.int64)
            if earlier:
                shared = [(common_prefix(prompt, call), len(call)) for call in earlier]
                longest, known = max(shared)
                prompt_tokens += len(prompt)
                reused_tokens += longest
                if all(length < total for length, total in shared):
                    branches += 1
                    rerendered_tokens += min(len(prompt), known) - longest
            earlier.append(np.append(prompt, call.completion_token_ids))
    return {
        "turns/mean": statistics.fmean(len(t.calls) for t in trajectories),
        "turns/max": float(max(len(t.calls) for t in trajectories)),
        "turns/reused_frac": reused_tokens / prompt_tokens if prompt_tokens else 1.0,
        "turns/branches_mean": branches / len(trajectories),
        "turns/rerendered_tokens": rerendered_tokens / len(trajectories),
        "turns/limited_frac": statistics.fmean(t.end != "stop" for t in trajectories),
    }


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix, in tokens."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
