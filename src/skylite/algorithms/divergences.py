"""Divergences between the distributions of a policy and its teacher."""

from __future__ import annotations

import math

import torch
from torch import Tensor
from torch.nn.functional import pad

NOTHING = -1e4
"""The logprob of a token that is not there: its probability is exactly 0."""
LEAST_REST = 1e-7
"""Of a teacher's probability: float32 logprobs do not say less."""


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


def top_and_rest(policy: Tensor, ids: Tensor, teacher: Tensor) -> tuple[Tensor, Tensor]:
    """[N, K + 1] logprobs of the teacher's K best tokens, and of all others together, for both.

    The teacher's last one is log(1 - the sum of the K probabilities), as in TRL's ServerDistillationTrainer
    (`loss_add_tail`). The policy's is the same as a sum over the others, without the rounding of 1 - x. A
    divergence of these is at most that of the whole distributions.

    Args:
        policy: [N, V] logprobs, with gradient.
        ids: [N, K] tokens. One beyond V, of a larger vocabulary, is among the others.
        teacher: [N, K] their logprobs.
    """
    size = policy.shape[1]
    places = ids.clamp(max=size)  # in the column that is added: a token that is not there
    known = pad(policy, (0, 1), value=NOTHING)
    others = known.scatter(1, places, -math.inf).logsumexp(1, keepdim=True)
    best = teacher.masked_fill(places == size, NOTHING)
    rest = -torch.expm1(best.double().logsumexp(1, keepdim=True))
    return (
        torch.cat([known.gather(1, places), others], 1),
        torch.cat([best, rest.clamp(min=LEAST_REST).log().to(best.dtype)], 1),
    )


def _kl(p: Tensor, q: Tensor) -> Tensor:
    """[N] KL(p || q) of logprobs [N, V]."""
    return (torch.exp(p) * (p - q)).sum(-1)
