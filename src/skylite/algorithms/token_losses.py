"""Losses of the trainer's verbs: one value for each target token [C]. Their sum is the loss.

Nothing is divided by a number of tokens: the weights and advantages of the caller say what counts how much.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

Inputs = Mapping[str, Tensor]
"""[C] each."""
Settings = Mapping[str, float]


def cross_entropy(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-w log p"""
    return -logprobs * inputs["weights"]


def importance_sampling(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-(p / q) A"""
    return -_ratio(logprobs, inputs) * inputs["advantages"]


def ppo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-min(r A, clip(r) A) with r = p / q (arXiv 1707.06347)."""
    ratio, advantages = _ratio(logprobs, inputs), inputs["advantages"]
    return -torch.minimum(ratio * advantages, _clip(ratio, settings) * advantages)


def cispo(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-clip(p / q) A log p, with no gradient through the ratio (arXiv 2506.13585)."""
    return -_clip(_ratio(logprobs, inputs), settings).detach() * logprobs * inputs["advantages"]


def dro(logprobs: Tensor, inputs: Inputs, settings: Settings) -> Tensor:
    """-(A log p - beta / 2 (log p / q)^2) (arXiv 2501.12599)."""
    penalty = 0.5 * settings["beta"] * (logprobs - inputs["logprobs"]).square()
    return penalty - logprobs * inputs["advantages"]


TOKEN_LOSSES: dict[str, Callable[[Tensor, Inputs, Settings], Tensor]] = {
    "cross_entropy": cross_entropy,
    "importance_sampling": importance_sampling,
    "ppo": ppo,
    "cispo": cispo,
    "dro": dro,
}
"""What each reads, and its defaults: skylite/verbs.py."""


def _ratio(logprobs: Tensor, inputs: Inputs) -> Tensor:
    return torch.exp(logprobs - inputs["logprobs"])


def _clip(ratio: Tensor, settings: Settings) -> Tensor:
    return ratio.clamp(settings["clip_low_threshold"], settings["clip_high_threshold"])
