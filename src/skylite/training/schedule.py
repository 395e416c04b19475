"""The learning rate of a step."""

from __future__ import annotations

import math

from skylite.config import OptimConfig


def rate_factor(step: int, num_steps: int, config: OptimConfig) -> float:
    """Share of the full rate at `step` (1-based): a linear warmup, then constant, or a fall that reaches zero right after the last step."""
    if step <= config.warmup_steps:
        return step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "linear":
        return 1 - done
    if config.schedule == "cosine":
        return 0.5 * (1 + math.cos(math.pi * done))
    return 1.0
