"""From a step's samples to what this rank computes: mini-batches of micro-batches, and what is known of their tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from skylite.algorithms.losses import AGGREGATIONS, BatchSize
from skylite.config.train import TrainConfig
from skylite.model.distributed import Dist
from skylite.model.packing import PackedTokens, pack
from skylite.model.policy import Policy
from skylite.run.rollout_file import TrainSample
from skylite.trainer.batching import Batch, Item, plan_micro_batches

KEY_STRIDE = 1 << 24
"""Longer than any completion: a token's key is its sample's number times this, plus its place."""


@dataclass(slots=True, kw_only=True)
class MicroBatch:
    """One forward and backward pass of this rank. [C]: the completion tokens of its samples. Filled in as the step goes."""

    items: list[Item]
    tokens: PackedTokens
    keys: Tensor
    """[C] int64: number each token the same way however the step is cut."""
    token_weights: Tensor
    """[C] what a token's loss is multiplied by; 0 where it is not learned from."""
    rollout_logprobs: Tensor
    """[C] what vLLM reported."""
    advantages: Tensor
    """[C]"""
    old_logprobs: Tensor | None = None
    """[C] before the first update; None: the training pass itself finds them."""
    entropies: Tensor | None = None
    """[C] measured with `old_logprobs`."""
    kl_penalty: Tensor | None = None
    """[C] kl_coef * KL estimate, where the KL is in the reward."""
    values: Tensor | None = None
    """[C] the critic's, before its first update."""
    returns: Tensor | None = None
    """[C] what the critic should have said."""
    selected: Tensor | None = None
    """[C] bool: chosen by covariance for the coming update."""
    entropy_mask: Tensor | None = None
    """[C] bool: among the highest entropies for the coming update."""


@dataclass(frozen=True, slots=True)
class MiniBatch:
    """This rank's share of what one optimizer update learns from."""

    micro_batches: list[MicroBatch]
    size: BatchSize
    computed: frozenset[int]
    """Numbers of the samples that go through the model, on any rank."""


def mini_batches(
    batch: Batch, known: Tensor | None, policy: Policy, config: TrainConfig, dist: Dist
) -> list[MiniBatch]:
    """The step cut into updates, each planned over ranks and micro-batches.

    `known` [N, G]: advantages that need no forward pass; None: the model is asked first, so every sample is computed.
    """
    num_groups, parts = len(batch.groups), config.algorithm.updates_per_step
    bounds = [num_groups * i // parts for i in range(parts + 1)]
    sizes = [_batch_size(batch, range(a, b), config) for a, b in pairwise(bounds)]
    computed = [
        [item for row in range(a, b) for item in _items(batch, row, known, size, config)]
        for (a, b), size in zip(pairwise(bounds), sizes, strict=True)
    ]
    if not any(
        computed
    ):  # nothing to learn: one group is computed all the same, so that the metrics have something to speak of
        computed[0] = [
            Item(sample=s, row=0, column=i, number=i, token_weight=0.0) for i, s in enumerate(batch.groups[0])
        ]
    return [
        _planned(items, size, known, policy, config, dist)
        for items, size in zip(computed, sizes, strict=True)
    ]


def counts(batch: Batch, row: int, sample: TrainSample, config: TrainConfig) -> bool:
    """Whether a sample is in the loss at all: the one place that decides on equal groups and truncated completions."""
    dropped = batch.zero_std[row] and config.algorithm.zero_std_groups != "keep"
    return not dropped and not (sample.truncated and config.algorithm.mask_truncated)


def _batch_size(batch: Batch, rows: range, config: TrainConfig) -> BatchSize:
    counted = [s for row in rows for s in batch.groups[row] if counts(batch, row, s, config)]
    return BatchSize(
        sum(len(s.completion_token_ids) for s in counted), len(counted), config.rollout.max_completion_tokens
    )


def _items(batch: Batch, row: int, known: Tensor | None, size: BatchSize, config: TrainConfig) -> list[Item]:
    """The samples of a group that need a forward pass: those with a gradient, or all where something else than the advantage counts."""
    weight = AGGREGATIONS[config.algorithm.aggregation]
    items = []
    for column, sample in enumerate(batch.groups[row]):
        counted = counts(batch, row, sample, config)
        if known is None or (counted and (_every_token_counts(config) or _has_gradient(batch, row, known))):
            token_weight = weight(len(sample.completion_token_ids), size) if counted else 0.0
            number = row * len(batch.groups[row]) + column
            items.append(
                Item(sample=sample, row=row, column=column, number=number, token_weight=token_weight)
            )
    return items


def _has_gradient(batch: Batch, row: int, known: Tensor) -> bool:
    return bool((known[row] != 0).any())


def _every_token_counts(config: TrainConfig) -> bool:
    algorithm = config.algorithm
    return (
        algorithm.uses_ref
        or algorithm.entropy_coef != 0
        or algorithm.selects_by_cov
        or algorithm.top_entropy_quantile < 1
    )


def _planned(
    items: Sequence[Item],
    size: BatchSize,
    known: Tensor | None,
    policy: Policy,
    config: TrainConfig,
    dist: Dist,
) -> MiniBatch:
    budget = config.trainer.tokens_per_micro_batch
    assert budget != "auto", "trainer/memory.py has decided before the first step"
    plan = plan_micro_batches(items, budget, dist.dp_size, policy.packing)
    return MiniBatch(
        [_micro_batch(part, known, policy) for part in plan[dist.dp_rank]],
        size,
        frozenset(i.number for i in items),
    )


def _micro_batch(items: list[Item], known: Tensor | None, policy: Policy) -> MicroBatch:
    samples, device = [i.sample for i in items], policy.device
    lengths = [len(s.completion_token_ids) for s in samples]
    keys = [i.number * KEY_STRIDE + t for i, n in zip(items, lengths, strict=True) for t in range(n)]
    advantages = [0.0 if known is None else float(known[i.row, i.column]) for i in items]

    def by_token(values: Sequence[float]) -> Tensor:
        return torch.tensor(
            [v for v, n in zip(values, lengths, strict=True) for _ in range(n)],
            dtype=torch.float32,
            device=device,
        )

    return MicroBatch(
        items=items,
        tokens=pack(
            [s.prompt_token_ids for s in samples], [s.completion_token_ids for s in samples], [s.group for s in samples],
            policy.packing, device,
        ),
        keys=torch.tensor(keys, dtype=torch.int64, device=device),
        token_weights=by_token([i.token_weight for i in items]),
        rollout_logprobs=torch.tensor([x for s in samples for x in s.rollout_logprobs], dtype=torch.float32, device=device),
        advantages=by_token(advantages),
    )  # fmt: skip
