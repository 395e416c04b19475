"""Chooses tokens of a mini-batch: by covariance (Clip-Cov, KL-Cov, arXiv 2505.22617) or entropy (2506.01939).

The trainer applies these in one file. They stand here because each is a paper's rule, as every file in
algorithms/: pure tensors, tested by hand.
"""

from __future__ import annotations

import torch
from torch import Tensor


def covariances(advantages: Tensor, logprobs: Tensor) -> Tensor:
    """[C] (A - mean A)(log p - mean log p): how much a token pulls the entropy down (arXiv 2505.22617)."""
    return (advantages - advantages.mean()) * (logprobs - logprobs.mean())


def clip_cov_selection(
    cov: Tensor, clipped: Tensor, frac: float, low: float, high: float, generator: torch.Generator
) -> Tensor:
    """bool [C]: a random `frac` of all tokens (at least one), from unclipped ones with low < covariance <
    high.
    """
    candidates = torch.nonzero((cov > low) & (cov < high) & ~clipped).flatten()
    count = min(len(candidates), max(1, int(frac * len(cov))))
    drawn = candidates[torch.randperm(len(candidates), generator=generator)[:count].to(candidates.device)]
    return torch.zeros_like(cov, dtype=torch.bool).index_fill(0, drawn, value=True)


def kl_cov_selection(cov: Tensor, frac: float) -> Tensor:
    """bool [C]: the `frac` of all tokens (at least one) with the highest covariance.

    Ties go to earlier tokens.
    """
    order = torch.argsort(cov, descending=True, stable=True)[: max(1, int(frac * len(cov)))]
    return torch.zeros_like(cov, dtype=torch.bool).index_fill(0, order, value=True)


def entropy_threshold(entropies: Tensor, quantile: float) -> float:
    """The entropy reached by the `quantile` share of tokens with the highest, interpolated linearly."""
    return float(torch.quantile(entropies.double(), 1 - quantile))
