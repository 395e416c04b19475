"""What is added to a completion's score before it becomes the reward that is trained on."""

from __future__ import annotations


def overlong_penalty(length: int, max_completion_tokens: int, buffer_frac: float) -> float:
    """Soft overlong punishment: 0, then down to -1 over the last `buffer_frac` of the length (DAPO, arXiv 2503.14476, eq. 13)."""
    buffer = buffer_frac * max_completion_tokens
    over = length - (max_completion_tokens - buffer)
    return -min(1.0, over / buffer) if buffer > 0 and over > 0 else 0.0
