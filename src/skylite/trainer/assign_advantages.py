"""From rewards to the advantage of every token. What the model must be asked for first is asked by `look` in look.py."""

from __future__ import annotations

import torch
from torch import Tensor

from skylite.algorithms.advantages import GROUP_ADVANTAGES, gae, moments, token_returns, whiten
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.train import TrainConfig
from skylite.model.distributed import Dist
from skylite.trainer.batching import Batch
from skylite.trainer.micro_batch import MicroBatch


def known_advantages(batch: Batch, config: AlgorithmConfig) -> Tensor | None:
    """[N, G] where rewards and lengths suffice; None where values or the KL to the reference come in."""
    if config.advantage not in GROUP_ADVANTAGES or kl_in_reward(config):
        return None
    return GROUP_ADVANTAGES[config.advantage](batch.rewards, batch.lengths)


def kl_in_reward(config: AlgorithmConfig) -> bool:
    """Whether the KL to the reference is taken from the rewards."""
    return config.uses_ref and config.kl_in == "reward"


def assign_advantages(batch: Batch, micros: list[MicroBatch], config: TrainConfig, dist: Dist) -> None:
    """Fill in `advantages` (and the critic's `returns`) of every micro-batch of this rank, once the model has been asked."""
    algorithm = config.algorithm
    if algorithm.advantage in GROUP_ADVANTAGES:
        rewards = batch.rewards - _kl_of_samples(batch, micros, dist)
        advantages = GROUP_ADVANTAGES[algorithm.advantage](rewards, batch.lengths)
        for micro in micros:
            by_sample = torch.tensor(
                [float(advantages[i.row, i.column]) for i in micro.items], device=micro.advantages.device
            )
            micro.advantages = by_sample[micro.tokens.sequences]
        return
    for micro in micros:
        _assign_by_token(micro, algorithm)
    sums = (
        torch.stack([moments(m.advantages[m.token_weights > 0]) for m in micros]).sum(dim=0)
        if micros
        else torch.zeros(3).double()
    )
    dist.all_reduce_sum_(sums)
    for micro in micros:
        micro.advantages = whiten(micro.advantages, sums)


def _kl_of_samples(batch: Batch, micros: list[MicroBatch], dist: Dist) -> Tensor:
    """[N, G] penalty summed over each completion, found by whichever rank computed it."""
    total = torch.zeros(batch.rewards.numel(), device=dist.device)
    for micro in micros:
        assert micro.kl_penalty is not None
        numbers = torch.tensor([i.number for i in micro.items], dtype=torch.int64, device=dist.device)
        total.index_add_(0, numbers[micro.tokens.sequences], micro.kl_penalty)
    return dist.all_reduce_sum_(total).cpu().view_as(batch.rewards)


def _assign_by_token(micro: MicroBatch, config: AlgorithmConfig) -> None:
    """reinforce++ and gae, before whitening: the reward stands at the last token, the KL at every one."""
    rewards = torch.zeros_like(micro.advantages) if micro.kl_penalty is None else -micro.kl_penalty
    lengths = [len(i.sample.completion_token_ids) for i in micro.items]
    advantages, returns = [], []
    values = torch.zeros_like(rewards) if micro.values is None else micro.values
    for item, token_rewards, state_values in zip(
        micro.items, torch.split(rewards, lengths), torch.split(values, lengths), strict=True
    ):
        token_rewards = token_rewards.clone()
        token_rewards[-1] += item.sample.reward
        if config.uses_critic:
            advantages.append(gae(token_rewards, state_values, config.gamma, config.gae_lambda))
            returns.append(advantages[-1] + state_values)
        else:
            advantages.append(token_returns(token_rewards, config.gamma))
    micro.advantages = torch.cat(advantages) if advantages else micro.advantages
    micro.returns = torch.cat(returns) if returns else None
