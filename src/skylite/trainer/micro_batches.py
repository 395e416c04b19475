"""Pack: turns a step's batch into the micro-batches that this rank computes, update by update."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import pairwise

import numpy as np
from torch import Tensor

from skylite.algorithms.losses import AGGREGATIONS, POLICY_LOSSES, SEQUENCE_RATIOS, BatchSize
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.train import TrainConfig
from skylite.model.packing import NO_TOKENS, PackedTokens, pack_tokens, upload
from skylite.model.policy import Policy
from skylite.model.process_group import Dist
from skylite.trainer.chosen_algorithm import group_advantage
from skylite.trainer.micro_batch_plan import Batch, Part, plan_micro_batches
from skylite.types import Trajectory

KEY_STRIDE = 1 << 24
"""A token's key is trajectory number * KEY_STRIDE + token index; no trajectory has as many tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of this rank: S trajectories with C sampled tokens, call after call.

    Of a trajectory that was cut (micro_batch_plan.py), it holds some of the calls.
    """

    trajectories: list[Trajectory]
    """[S] with the calls that are computed here."""
    numbers: list[int]
    """[S] trajectory numbers in the step, see Batch."""
    tokens: PackedTokens
    """A segment is a trajectory, a sequence is a call."""
    keys: Tensor
    """[C] int64: identifies each token, however the step is packed."""
    token_weights: Tensor
    """[C] factor on a token's loss; 0 if the token is not in the loss."""
    num_update_tokens: int
    """Tokens in the loss of its optimizer update, over all micro-batches and ranks."""
    sampling_logprobs: Tensor
    """[C] as the engine reported them."""

    @property
    def counted(self) -> Tensor:
        """[C] bool: the tokens in the loss."""
        return self.token_weights > 0


def pack(batch: Batch, policy: Policy, config: TrainConfig, dist: Dist) -> list[list[MicroBatch]]:
    """Split the step into updates, and each update over the ranks: [updates][micro-batches of this rank]."""
    sizes = [_batch_size(batch, rows, config) for rows in _rows_of_updates(batch, config.algorithm)]
    computed = computed_numbers(batch, config.algorithm)
    return [
        _micro_batches(batch, numbers, size, policy, config, dist)
        for numbers, size in zip(computed, sizes, strict=True)
    ]


def computed_numbers(batch: Batch, config: AlgorithmConfig) -> list[list[int]]:
    """[updates] numbers of the trajectories that the ranks compute.

    Trajectories without a gradient are dropped, unless the algorithm needs the model's outputs for all.
    """
    updates = _rows_of_updates(batch, config)
    computed = [[number for row in rows for number in _needed(batch, row, config)] for rows in updates]
    if not any(computed):  # no gradient at all: compute one group with weight 0, to have metrics
        computed[0] = list(range(batch.group_size))
    return computed


def _rows_of_updates(batch: Batch, config: AlgorithmConfig) -> list[range]:
    """[updates] rows of their groups."""
    num_groups, num_updates = len(batch.groups), config.updates_per_step
    bounds = [num_groups * i // num_updates for i in range(num_updates + 1)]
    return [range(a, b) for a, b in pairwise(bounds)]


def is_counted(batch: Batch, row: int, trajectory: Trajectory, config: AlgorithmConfig) -> bool:
    """Whether a trajectory is in the loss. Only this drops zero-std groups and truncated trajectories."""
    dropped = batch.zero_std[row] and config.zero_std_groups != "keep"
    return not dropped and not (trajectory.is_truncated and config.mask_truncated)


def _batch_size(batch: Batch, rows: range, config: TrainConfig) -> BatchSize:
    counted = [
        t
        for row in rows
        for t in batch.groups[row].trajectories
        if is_counted(batch, row, t, config.algorithm)
    ]
    return BatchSize(sum(t.num_tokens for t in counted), len(counted), config.rollout.max_completion_tokens)


def _needed(batch: Batch, row: int, config: AlgorithmConfig) -> list[int]:
    """Numbers of the trajectories of a group that need a forward pass."""
    trajectories = enumerate(batch.groups[row].trajectories, start=row * batch.group_size)
    if batch.advantages is None:
        return [number for number, _ in trajectories]
    if not (_needs_every_token(config) or (batch.advantages[row] != 0).any()):
        return []
    return [number for number, t in trajectories if is_counted(batch, row, t, config)]


def _needs_every_token(config: AlgorithmConfig) -> bool:
    """Whether tokens with an advantage of 0 still matter to the loss."""
    return config.uses_ref or config.entropy_coef != 0 or config.selects_tokens


def _micro_batches(
    batch: Batch, numbers: list[int], size: BatchSize, policy: Policy, config: TrainConfig, dist: Dist
) -> list[MicroBatch]:
    budget = config.trainer.tokens_per_micro_batch
    assert budget != "auto", "trainer/micro_batch_memory.py replaces it before the first step"
    may_cut = not _joins_tokens(config)
    plan = plan_micro_batches(batch, numbers, budget, dist.dp_size, policy.packing, may_cut=may_cut)
    return [_micro_batch(batch, parts, size, policy, config.algorithm) for parts in plan[dist.dp_rank]]


def _joins_tokens(config: TrainConfig) -> bool:
    """Whether a token's loss may depend on the model's outputs for other tokens of its trajectory."""
    loss, importance = config.algorithm.policy_loss, config.importance
    joined_loss = loss in SEQUENCE_RATIOS or loss not in POLICY_LOSSES  # the user's own may do anything
    joined_weights = importance.level == "sequence" or importance.reject_kl is not None
    along_the_tokens = group_advantage(config.algorithm.advantage) is None
    return joined_loss or joined_weights or along_the_tokens


def _micro_batch(
    batch: Batch, parts: list[Part], size: BatchSize, policy: Policy, config: AlgorithmConfig
) -> MicroBatch:
    numbers, device = [p.number for p in parts], policy.device
    trajectories = [_calls_of(batch.trajectory(p.number), p) for p in parts]
    calls = [(index, s) for index, t in enumerate(trajectories) for s in t.calls]
    samples = [s for _, s in calls]
    lengths = np.array([t.num_tokens for t in trajectories], dtype=np.int64)
    before = [
        sum(len(s.completion_token_ids) for s in batch.trajectory(p.number).calls[: p.first]) for p in parts
    ]
    starts = np.array(numbers, dtype=np.int64) * KEY_STRIDE + np.array(before, dtype=np.int64)
    weights = np.array([_token_weight(batch, n, size, config) for n in numbers], dtype=np.float32)
    rollout = np.array([x for s in samples for x in s.sampling_logprobs], dtype=np.float32)
    keys, token_weights, sampling_logprobs = upload(
        [
            np.repeat(starts, lengths) + np.concatenate([NO_TOKENS, *map(np.arange, lengths)]),
            np.repeat(weights, lengths),
            rollout,
        ],
        device,
    )
    tokens = pack_tokens(
        [s.prompt_token_ids for s in samples],
        [s.completion_token_ids for s in samples],
        [numbers[index] // batch.group_size for index, _ in calls],
        policy.packing,
        device,
        segments=[index for index, _ in calls],
    )
    return MicroBatch(
        trajectories=trajectories,
        numbers=numbers,
        tokens=tokens,
        keys=keys,
        token_weights=token_weights,
        num_update_tokens=size.num_tokens,
        sampling_logprobs=sampling_logprobs,
    )


def _calls_of(trajectory: Trajectory, part: Part) -> Trajectory:
    """The trajectory with the part's calls only. A cut one needs no rewards: see _joins_tokens."""
    if part.last - part.first == len(trajectory.calls):
        return trajectory
    return replace(trajectory, calls=trajectory.calls[part.first : part.last], turn_rewards=())


def _token_weight(batch: Batch, number: int, size: BatchSize, config: AlgorithmConfig) -> float:
    """The factor on the loss of every token of a trajectory."""
    trajectory = batch.trajectory(number)
    if not is_counted(batch, number // batch.group_size, trajectory, config):
        return 0.0
    return AGGREGATIONS[config.aggregation](trajectory.num_tokens, size)
