"""Assign advantages: turns the rewards of trajectories into an advantage for every sampled token."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from skylite.algorithms.advantages import gae, moments, token_returns, whiten
from skylite.config.algorithm import AlgorithmConfig
from skylite.model.packing import upload
from skylite.model.process_group import Dist
from skylite.trainer.chosen_algorithm import group_advantage
from skylite.trainer.micro_batch_plan import Batch
from skylite.trainer.micro_batches import MicroBatch
from skylite.trainer.precompute_logprobs import Precomputed
from skylite.types import Trajectory

FloatArray = npt.NDArray[np.float32]


def assign_advantages(
    batch: Batch,
    micro_batches: Sequence[MicroBatch],
    known: Sequence[Precomputed],
    config: AlgorithmConfig,
    dist: Dist,
) -> tuple[list[Tensor], list[Tensor]]:
    """[C] advantages of each micro-batch of this rank, and the critic's returns; without a critic [].

    All ranks call it.
    """
    advantage = group_advantage(config.advantage)
    if advantage is None:
        return _token_advantages(micro_batches, known, config, dist)
    by_group = batch.advantages
    if by_group is None:
        rewards = batch.rewards - _kl_of_trajectories(batch, micro_batches, known, dist)
        by_group = advantage(rewards, batch.lengths)
    by_number = by_group.float().flatten().numpy()
    return upload([_by_token(m, by_number) for m in micro_batches], dist.device), []


def _by_token(micro: MicroBatch, by_number: FloatArray) -> FloatArray:
    """[N * G] by trajectory number -> [C]: every token gets the advantage of its trajectory."""
    lengths = np.array([t.num_tokens for t in micro.trajectories], dtype=np.int64)
    return np.repeat(by_number[np.array(micro.numbers, dtype=np.int64)], lengths)


def _kl_of_trajectories(
    batch: Batch, micro_batches: Sequence[MicroBatch], known: Sequence[Precomputed], dist: Dist
) -> Tensor:
    """[N, G] KL penalty, summed over the tokens of each trajectory and over ranks."""
    total = torch.zeros(batch.rewards.numel(), device=dist.device)
    numbers = upload([np.array(m.numbers, dtype=np.int64) for m in micro_batches], dist.device)
    for micro, found, own in zip(micro_batches, known, numbers, strict=True):
        assert found.kl_penalty is not None
        total.index_add_(0, own[micro.tokens.segments], found.kl_penalty)
    return dist.all_reduce_sum_(total).cpu().view_as(batch.rewards)


def _token_advantages(
    micro_batches: Sequence[MicroBatch], known: Sequence[Precomputed], config: AlgorithmConfig, dist: Dist
) -> tuple[list[Tensor], list[Tensor]]:
    """For reinforce++ and gae: advantages along each trajectory, whitened over the step, and returns.

    Computed on the CPU for all micro-batches at once. So it waits for the device twice: for the tokens'
    columns, and for the moments that whiten.
    """
    sizes = [len(m.token_weights) for m in micro_batches]
    nothing = [torch.zeros_like(m.token_weights) for m in micro_batches]
    kl, values, weights = _fetched(
        [x if k.kl_penalty is None else k.kl_penalty for x, k in zip(nothing, known, strict=True)],
        [x if k.values is None else k.values for x, k in zip(nothing, known, strict=True)],
        [m.token_weights for m in micro_batches],
    )
    advantages = _along_trajectories([t for m in micro_batches for t in m.trajectories], -kl, values, config)
    sums = dist.all_reduce_sum_(moments(advantages[weights > 0]).to(dist.device)).cpu()
    found = torch.stack([whiten(advantages, sums), advantages + values]).to(dist.device)
    whitened, returns = (list(torch.split(x, sizes)) for x in found)
    return whitened, returns if config.uses_critic else []


def _fetched(*columns: Sequence[Tensor]) -> Sequence[Tensor]:
    """For each column, the values of all micro-batches on the CPU."""
    rows = [torch.cat(list(parts)) if parts else torch.zeros(0) for parts in columns]
    return torch.unbind(torch.stack(rows).cpu())


def _along_trajectories(
    trajectories: Sequence[Trajectory], token_rewards: Tensor, values: Tensor, config: AlgorithmConfig
) -> Tensor:
    """[C] advantages before whitening from [C] KL penalties (negative) and values.

    The last token of a trajectory gets its reward too, or the last token of each turn the turn's reward.
    """
    if not trajectories:
        return token_rewards
    lengths = [t.num_tokens for t in trajectories]
    positions, given = _rewarded_tokens(trajectories)
    rewards = token_rewards.index_add(
        0, torch.tensor(positions), torch.tensor(given, dtype=token_rewards.dtype)
    )
    rewards, values = (
        pad_sequence(list(torch.split(x, lengths)), batch_first=True) for x in (rewards, values)
    )
    advantages = (
        gae(rewards, values, config.gamma, config.gae_lambda)
        if config.uses_critic
        else token_returns(rewards, config.gamma)
    )
    return advantages[torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]]


def _rewarded_tokens(trajectories: Sequence[Trajectory]) -> tuple[list[int], list[float]]:
    """Numbers of the sampled tokens that get a reward, and these rewards."""
    positions, given, end = [], [], 0
    for trajectory in trajectories:
        for turn, sample in enumerate(trajectory.calls):
            end += len(sample.completion_token_ids)
            if trajectory.turn_rewards:
                positions.append(end - 1)
                given.append(trajectory.turn_rewards[turn])
        if trajectory.turn_rewards:
            given[-1] += trajectory.penalty
        else:
            positions.append(end - 1)
            given.append(trajectory.train_reward)
    return positions, given
