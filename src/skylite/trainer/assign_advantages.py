"""Assign advantages: turns the rewards of trajectories into an advantage for every sampled token."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from skylite.algorithms.advantages import gae, moments, token_returns, whiten
from skylite.config.algorithm import AlgorithmConfig
from skylite.model.distributed import Dist
from skylite.trainer.batching import Batch
from skylite.trainer.pack import MicroBatch
from skylite.trainer.precompute import Precomputed, Targets
from skylite.trainer.user_functions import group_advantage


def assign_advantages(
    batch: Batch,
    micro_batches: Sequence[MicroBatch],
    known: Sequence[Precomputed],
    config: AlgorithmConfig,
    dist: Dist,
) -> list[Targets]:
    """The targets of each micro-batch of this rank. All ranks call it."""
    advantage = group_advantage(config.advantage)
    if advantage is not None:
        by_group = batch.advantages
        if by_group is None:
            rewards = batch.rewards - _kl_of_trajectories(batch, micro_batches, known, dist)
            by_group = advantage(rewards, batch.lengths)
        by_number = by_group.flatten()
        return [
            Targets(known=k, advantages=_by_token(m, by_number))
            for m, k in zip(micro_batches, known, strict=True)
        ]
    found = [_token_advantages(m, k, config) for m, k in zip(micro_batches, known, strict=True)]
    counted = [moments(t.advantages[m.counted]) for m, t in zip(micro_batches, found, strict=True)]
    sums = torch.stack(counted).sum(dim=0) if counted else torch.zeros(3, dtype=torch.float64)
    dist.all_reduce_sum_(sums)
    return [replace(t, advantages=whiten(t.advantages, sums)) for t in found]


def _by_token(micro: MicroBatch, by_number: Tensor) -> Tensor:
    """[N * G] by trajectory number -> [C]: every token gets the advantage of its trajectory."""
    own = [float(by_number[number]) for number in micro.numbers]
    return torch.tensor(own, dtype=torch.float32, device=micro.keys.device)[micro.tokens.segments]


def _kl_of_trajectories(
    batch: Batch, micro_batches: Sequence[MicroBatch], known: Sequence[Precomputed], dist: Dist
) -> Tensor:
    """[N, G] KL penalty, summed over the tokens of each trajectory and over ranks."""
    total = torch.zeros(batch.rewards.numel(), device=dist.device)
    for micro, found in zip(micro_batches, known, strict=True):
        assert found.kl_penalty is not None
        numbers = torch.tensor(micro.numbers, dtype=torch.int64, device=dist.device)
        total.index_add_(0, numbers[micro.tokens.segments], found.kl_penalty)
    return dist.all_reduce_sum_(total).cpu().view_as(batch.rewards)


def _token_advantages(micro: MicroBatch, known: Precomputed, config: AlgorithmConfig) -> Targets:
    """reinforce++ and gae before whitening, along the sampled tokens of each trajectory.

    The last token gets the trajectory's reward, every token its KL penalty.
    """
    lengths = [t.num_tokens for t in micro.trajectories]
    nothing = torch.zeros_like(micro.token_weights)
    rewards = nothing if known.kl_penalty is None else -known.kl_penalty
    values = nothing if known.values is None else known.values
    parts = zip(micro.trajectories, torch.split(rewards, lengths), torch.split(values, lengths), strict=True)
    advantages, returns = [], []
    for trajectory, token_rewards, token_values in parts:
        token_rewards = token_rewards.clone()
        token_rewards[-1] += trajectory.train_reward
        if config.uses_critic:
            advantages.append(gae(token_rewards, token_values, config.gamma, config.gae_lambda))
            returns.append(advantages[-1] + token_values)
        else:
            advantages.append(token_returns(token_rewards, config.gamma))
    return Targets(
        known=known,
        advantages=torch.cat(advantages) if advantages else nothing,
        returns=(torch.cat(returns) if returns else values) if config.uses_critic else None,
    )
