"""From a step's samples to micro-batches: who trains on what, in how many passes, and as which tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.advantages import zero_std_groups
from skylite.errors import DataError
from skylite.model.packing import Packing
from skylite.model.prefix_tree import shared_length
from skylite.run.rollout_file import TrainSample


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's samples by group: N groups of G, in file order."""

    groups: list[list[TrainSample]]
    rewards: Tensor
    """[N, G]"""
    lengths: Tensor
    """[N, G] completion tokens, float."""
    zero_std: list[bool]
    """[N] groups whose rewards are all the same."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """A sample on its way into a micro-batch."""

    sample: TrainSample
    row: int
    """Its group's row in `Batch`, ..."""
    column: int
    """... and its place there."""
    number: int
    """Its place in the whole step."""
    token_weight: float
    """What the loss of each of its tokens is multiplied by; 0: it is computed, but not learned from."""


def arrange(samples: Sequence[TrainSample]) -> Batch:
    """The samples by group. Raises DataError when groups differ in size or a sample is empty."""
    groups = [list(g) for _, g in groupby(sorted(samples, key=lambda s: s.group), key=lambda s: s.group)]
    sizes = {len(g) for g in groups}
    if len(sizes) != 1 or any(not s.prompt_token_ids or not s.completion_token_ids for s in samples):
        raise DataError(
            f"The rollouts have groups of {sorted(sizes)} samples, or a sample without tokens; every group must have the same size.",
            "Delete the rollout file; the step is sampled again on resume.",
        )
    rewards = torch.tensor([[s.reward for s in g] for g in groups])
    lengths = torch.tensor([[float(len(s.completion_token_ids)) for s in g] for g in groups])
    return Batch(groups=groups, rewards=rewards, lengths=lengths, zero_std=zero_std_groups(rewards).tolist())


def plan_micro_batches(
    samples: Sequence[Item], budget: int, dp_size: int, packing: Packing
) -> list[list[list[Item]]]:
    """[dp_size][M] micro-batches of samples, the same number M for every rank, the largest first; some may be empty.

    A micro-batch computes at most `budget` tokens, padding included (one sample that is longer still goes alone). In a tree siblings
    stay together unless their group alone exceeds the budget. Deterministic, so that every rank finds the same plan without talking.
    """
    if not samples:
        return [[] for _ in range(dp_size)]
    ordered = _of_tree(samples, budget, dp_size) if packing == "tree" else _of_rows(samples, budget, dp_size)
    return [ordered[rank::dp_size] for rank in range(dp_size)]


def _of_tree(samples: Sequence[Item], budget: int, dp_size: int) -> list[list[Item]]:
    """Micro-batches of at most `budget` unique tokens, a multiple of `dp_size`, the largest first."""
    prefix = _common_prefix(samples)
    units = sorted(_units(samples, budget, prefix), key=lambda u: -u[0])
    num_bins = dp_size
    while True:
        bins = _fill(units, num_bins)
        if max(load for load, _ in bins) + prefix <= budget or max(len(content) for _, content in bins) == 1:
            break
        num_bins += dp_size
    return [[s for unit in content for s in unit] for _, content in sorted(bins, key=lambda b: -b[0])]


def _of_rows(samples: Sequence[Item], budget: int, dp_size: int) -> list[list[Item]]:
    """The same of samples that are a row each, as long as the longest beside it: neighbours by length, as even as their number allows."""
    ordered = sorted(samples, key=lambda i: (-_row_length(i), i.number))
    num_bins = -(-len(_cut(ordered, budget)) // dp_size) * dp_size
    smallest = (
        bisect_left(range(1, budget), True, key=lambda limit: len(_cut(ordered, limit)) <= num_bins) + 1
    )
    bins = sorted(_cut(ordered, smallest), key=lambda b: -len(b) * _row_length(b[0]))
    return bins + [[] for _ in range(num_bins - len(bins))]


def _cut(ordered: Sequence[Item], budget: int) -> list[list[Item]]:
    """Runs of samples, the longest first in each, whose rows have at most `budget` places together."""
    bins: list[list[Item]] = []
    for item in ordered:
        if bins and (len(bins[-1]) + 1) * _row_length(bins[-1][0]) <= budget:
            bins[-1].append(item)
        else:
            bins.append([item])
    return bins


def _row_length(item: Item) -> int:
    """Tokens that the model reads of a sample: all but the last."""
    return len(item.sample.prompt_token_ids) + len(item.sample.completion_token_ids) - 1


def _sequence(sample: TrainSample) -> list[int]:
    return sample.prompt_token_ids + sample.completion_token_ids


def _common_prefix(samples: Sequence[Item]) -> int:
    prompts = [s.sample.prompt_token_ids for s in samples]
    low, high = min(prompts), max(prompts)
    return next(
        (i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high))
    )


def _units(samples: Sequence[Item], budget: int, prefix: int) -> list[tuple[int, list[Item]]]:
    """(tokens besides the prefix, samples) that are not cut: groups, or runs of siblings of a group over the budget."""
    units: list[tuple[int, list[Item]]] = []
    ordered = sorted((s.sample.group, _sequence(s.sample), i) for i, s in enumerate(samples))
    previous, previous_group = np.empty(0, dtype=np.int64), None
    for group, tokens, index in ordered:
        sequence = np.asarray(tokens, dtype=np.int64)
        new = len(sequence) - shared_length(previous, sequence)
        if group == previous_group and prefix + units[-1][0] + new <= budget:
            units[-1] = (units[-1][0] + new, [*units[-1][1], samples[index]])
        else:
            units.append((len(sequence) - prefix, [samples[index]]))
        previous, previous_group = sequence, group
    return units


def _fill(units: list[tuple[int, list[Item]]], num_bins: int) -> list[tuple[int, list[list[Item]]]]:
    """Longest-processing-time rule: each unit, largest first, goes to the emptiest bin."""
    bins: list[tuple[int, list[list[Item]]]] = [(0, []) for _ in range(num_bins)]
    for size, unit in units:
        index = min(range(num_bins), key=lambda i: bins[i][0])
        load, content = bins[index]
        bins[index] = (load + size, [*content, unit])
    return bins
