"""Plans a step: which rank computes which trajectories in which micro-batch.

micro_batches.py splits the step into updates and makes the tensors.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.advantages import zero_std_groups
from skylite.config.algorithm import AlgorithmConfig
from skylite.errors import DataError
from skylite.model.packing import Packing
from skylite.model.prefix_tree import shared_length, tree_size
from skylite.trainer.chosen_algorithm import group_advantage
from skylite.types import Call, Group, Trajectory


@dataclass(frozen=True, slots=True, order=True)
class Part:
    """The calls `first` to `last - 1` of the trajectory `number`: all of them, unless it was cut."""

    number: int
    first: int
    last: int


Item = tuple[Part, tuple[Call, ...]]
"""A part, and its calls."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's trajectories: N groups of G, in file order.

    A trajectory's number in the step is `row * G + column`.
    """

    groups: Sequence[Group]
    rewards: Tensor
    """[N, G] float32, penalties included."""
    lengths: Tensor
    """[N, G] sampled tokens, float32."""
    zero_std: list[bool]
    """[N] groups whose rewards are all equal."""
    advantages: Tensor | None
    """[N, G] if they depend on rewards and lengths only; None if they need values or the KL."""

    @property
    def group_size(self) -> int:
        return self.rewards.shape[1]

    @property
    def trajectories(self) -> list[Trajectory]:
        """[N * G] by number."""
        return [t for g in self.groups for t in g.trajectories]

    def trajectory(self, number: int) -> Trajectory:
        """The trajectory with this number."""
        row, column = divmod(number, self.group_size)
        return self.groups[row].trajectories[column]


def arrange(groups: Sequence[Group], config: AlgorithmConfig) -> Batch:
    """The step as a batch. Raises DataError if groups differ in size."""
    sizes = {len(g.trajectories) for g in groups}
    if len(sizes) != 1:
        raise DataError(
            f"The step's groups have {sorted(sizes)} trajectories; every group must have the same number.",
            "Delete the rollout file; a resumed run samples the step again.",
        )
    rewards = torch.tensor([[t.train_reward for t in g.trajectories] for g in groups])
    lengths = torch.tensor([[float(t.num_tokens) for t in g.trajectories] for g in groups])
    advantage = None if config.kl_in_reward else group_advantage(config.advantage)
    return Batch(
        groups=groups,
        rewards=rewards,
        lengths=lengths,
        zero_std=zero_std_groups(rewards).tolist(),
        advantages=None if advantage is None else advantage(rewards, lengths),
    )


def plan_micro_batches(
    batch: Batch, numbers: Sequence[int], budget: int, dp_size: int, packing: Packing, *, may_cut: bool
) -> list[list[list[Part]]]:
    """Micro-batches of trajectories, the largest first: [dp_size][M], with the same M for every rank.

    A micro-batch computes at most `budget` tokens, padding included; some may be empty. In a tree, only a
    group over the budget is split. With `may_cut`, a trajectory over the budget is cut between its calls. A
    part that is still over it gets its own micro-batch. All ranks make the same plan without communication.
    """
    if not numbers:
        return [[] for _ in range(dp_size)]
    items = [
        (part, trajectory.calls[part.first : part.last])
        for number in numbers
        for trajectory in [batch.trajectory(number)]
        for part in _parts(number, trajectory, budget if may_cut else None, packing)
    ]
    make = _tree_bins if packing == "tree" else _row_bins
    ordered = make(items, batch.group_size, budget, dp_size)
    return [ordered[rank::dp_size] for rank in range(dp_size)]


def _parts(number: int, trajectory: Trajectory, budget: int | None, packing: Packing) -> list[Part]:
    """The trajectory in as few parts as fit the budget, or the longest call if that is longer."""
    if budget is None or len(trajectory.calls) == 1:
        return [Part(number, 0, len(trajectory.calls))]
    calls = _calls(trajectory.calls)
    limit = max(budget, *map(len, calls))
    starts = [0]
    if _size(calls, packing) <= limit:
        return [Part(number, 0, len(calls))]
    for index in range(1, len(calls)):
        if _size(calls[starts[-1] : index + 1], packing) > limit:
            starts.append(index)
    return [Part(number, first, last) for first, last in pairwise([*starts, len(calls)])]


def _size(calls: Sequence[list[int]], packing: Packing) -> int:
    """Tokens that the calls of a group compute."""
    if packing == "tree":
        return tree_size(calls, [0] * len(calls))
    return len(calls) * max(map(len, calls))


def _tree_bins(items: Sequence[Item], group_size: int, budget: int, dp_size: int) -> list[list[Part]]:
    """Micro-batches of at most `budget` unique tokens, the largest first; a multiple of `dp_size` of them."""
    calls = {part: _calls(samples) for part, samples in items}
    units = sorted(_units(calls, group_size, budget), key=lambda u: -u[0])
    num_bins = dp_size
    while True:
        bins = [
            (_load([part for unit in bin_ for part in unit], calls, group_size), bin_)
            for bin_ in _fill(units, num_bins)
        ]
        if all(load <= budget or len(bin_) == 1 for load, bin_ in bins):
            break
        num_bins += dp_size
    return [[i for unit in bin_ for i in unit] for _, bin_ in sorted(bins, key=lambda b: -b[0])]


def _load(parts: Sequence[Part], calls: Mapping[Part, list[list[int]]], group_size: int) -> int:
    """Unique tokens of the parts' calls."""
    sequences = [(part.number // group_size, call) for part in parts for call in calls[part]]
    return tree_size([c for _, c in sequences], [g for g, _ in sequences]) if sequences else 0


def _units(
    calls: Mapping[Part, list[list[int]]], group_size: int, budget: int
) -> list[tuple[int, list[Part]]]:
    """(unique tokens, parts) that stay together: a group, or a part of a group over the budget.

    The tokens are those that follow the common prefix of all calls.
    """
    every = [call for sequences in calls.values() for call in sequences]
    low, high = (np.asarray(call, dtype=np.int64) for call in (min(every), max(every)))
    prefix = shared_length(low, high)
    units: list[tuple[int, list[Part]]] = []
    ordered = sorted(calls, key=lambda part: (part.number // group_size, calls[part], part))
    for _, members in groupby(ordered, key=lambda part: part.number // group_size):
        group = list(members)
        whole = _load(group, calls, group_size)
        if whole <= budget:
            units.append((whole - prefix, group))
            continue
        unit: list[Part] = []
        for part in group:
            if unit and _load([*unit, part], calls, group_size) > budget:
                units.append((_load(unit, calls, group_size) - prefix, unit))
                unit = []
            unit = [*unit, part]
        units.append((_load(unit, calls, group_size) - prefix, unit))
    return units


def _calls(samples: Sequence[Call]) -> list[list[int]]:
    """The token sequence of each call."""
    return [s.prompt_token_ids + s.completion_token_ids for s in samples]


def _fill(units: list[tuple[int, list[Part]]], num_bins: int) -> list[list[list[Part]]]:
    """Longest-processing-time rule: each unit, from large to small, goes to the emptiest bin."""
    bins: list[tuple[int, list[list[Part]]]] = [(0, []) for _ in range(num_bins)]
    for size, unit in units:
        index = min(range(num_bins), key=lambda i: bins[i][0])
        load, content = bins[index]
        bins[index] = (load + size, [*content, unit])
    return [content for _, content in bins]


def _row_bins(items: Sequence[Item], group_size: int, budget: int, dp_size: int) -> list[list[Part]]:
    """The same for padded rows. Neighbours by length share a micro-batch, which pads to its longest row."""
    ordered = sorted(items, key=lambda i: (-_row_length(i), i[0]))
    num_bins = -(-len(_cut(ordered, budget)) // dp_size) * dp_size
    limits = range(1, budget)
    smallest = bisect_left(limits, True, key=lambda limit: len(_cut(ordered, limit)) <= num_bins) + 1
    bins = sorted(_cut(ordered, smallest), key=lambda b: -_num_rows(b) * _row_length(b[0]))
    return [[part for part, _ in content] for content in bins] + [[] for _ in range(num_bins - len(bins))]


def _cut(ordered: Sequence[Item], budget: int) -> list[list[Item]]:
    """Split parts, sorted from long to short, into runs of at most `budget` padded tokens."""
    bins: list[list[Item]] = []
    for item in ordered:
        if bins and _num_rows([*bins[-1], item]) * _row_length(bins[-1][0]) <= budget:
            bins[-1].append(item)
        else:
            bins.append([item])
    return bins


def _num_rows(items: Sequence[Item]) -> int:
    return sum(len(samples) for _, samples in items)


def _row_length(item: Item) -> int:
    """Tokens that the model reads of the part's longest call: all but the last."""
    return max(len(s.prompt_token_ids) + len(s.completion_token_ids) for s in item[1]) - 1
