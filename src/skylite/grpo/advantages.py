"""How good a completion is compared with the others of its prompt."""

from __future__ import annotations

import torch
from torch import Tensor


def group_advantages(rewards: Tensor, *, normalize_std: bool = True, eps: float = 1e-6) -> Tensor:
    """rewards [N, G] -> advantages [N, G]: centred in each group, and divided by the group's (sample) standard deviation.

    DeepSeekMath, arXiv 2402.03300, section 4.1.2; `normalize_std=False` is Dr. GRPO (arXiv 2503.20783). A group whose rewards are
    all equal gets exact zeros: rounding in its mean must not turn into a gradient.
    """
    centred = rewards - rewards.mean(dim=1, keepdim=True)
    centred = torch.where(equal_reward_groups(rewards)[:, None], torch.zeros_like(centred), centred)
    return centred / (rewards.std(dim=1, keepdim=True) + eps) if normalize_std else centred


def equal_reward_groups(rewards: Tensor) -> Tensor:
    """rewards [N, G] -> bool [N]: the groups that say nothing, because every completion earned the same."""
    return (rewards == rewards[:, :1]).all(dim=1)
