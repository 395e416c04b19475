"""Divergences between the distributions of a policy and its teacher."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def jensen_shannon(policy: Tensor, teacher: Tensor, beta: float) -> Tensor:
    """[N] generalised Jensen-Shannon divergence in nats (GKD, arXiv 2306.13649, eq. 1).

    beta KL(teacher || m) + (1 - beta) KL(policy || m) with m = beta teacher + (1 - beta) policy. Its limits:
    beta 0 is KL(teacher || policy), the forward KL; 1 is KL(policy || teacher), the reverse one.

    Args:
        policy: [N, V] logprobs.
        teacher: [N, V] logprobs.
        beta: 0 to 1.
    """
    if beta == 0:
        return _kl(teacher, policy)
    if beta == 1:
        return _kl(policy, teacher)
    mixture = torch.logaddexp(teacher + math.log(beta), policy + math.log1p(-beta))
    return beta * _kl(teacher, mixture) + (1 - beta) * _kl(policy, mixture)


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """[N] KL(p || q) of logprobs [N, V]."""
    return (torch.exp(p) * (p - q)).sum(-1)
