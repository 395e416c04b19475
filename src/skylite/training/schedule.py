"""The learning rate of a step."""

from __future__ import annotations

import math

from skylite.config import OptimConfig


def learning_rate(step: int, num_steps: int, config: OptimConfig) -> float:
    """Rate of `step` (1-based): a linear warmup, then constant, or a fall that reaches zero right after the last step."""
    if step <= config.warmup_steps:
        return config.lr * step / config.warmup_steps
    done = (step - 1 - config.warmup_steps) / max(1, num_steps - config.warmup_steps)
    if config.schedule == "linear":
        return config.lr * (1 - done)
    if config.schedule == "cosine":
        return config.lr * 0.5 * (1 + math.cos(math.pi * done))
    return config.lr
