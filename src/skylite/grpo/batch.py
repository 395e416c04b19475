"""From a step's samples to micro-batches: who trains on what, in how many passes, and as which tensors."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from skylite.errors import DataError
from skylite.grpo.advantages import equal_reward_groups
from skylite.grpo.attention import tree_layout
from skylite.grpo.tree import build_tree, shared_length
from skylite.run.rollout_file import TrainSample

Packing = Literal["tree", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """A step's samples by group: N groups of G, in file order."""

    groups: list[list[TrainSample]]
    rewards: Tensor
    """[N, G]"""
    lengths: Tensor
    """[N, G] completion tokens, float."""
    equal: list[bool]
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


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Sequences as one model call. C: completion tokens of all of them, sequence by sequence."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""
    rows: Tensor
    """[C] row of the flattened logits that predicts the token."""
    targets: Tensor
    """[C] the token."""
    sequences: Tensor
    """[C] which sequence the token belongs to."""
    num_sequences: int
    num_nodes: int
    """Tokens the model really computes, padding included."""


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
    return Batch(groups=groups, rewards=rewards, lengths=lengths, equal=equal_reward_groups(rewards).tolist())


def plan_micro_batches(samples: Sequence[Item], budget: int, dp_size: int, packing: Packing) -> list[list[list[Item]]]:
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
    smallest = bisect_left(range(1, budget), True, key=lambda limit: len(_cut(ordered, limit)) <= num_bins) + 1
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


def pack(
    prompts: Sequence[list[int]], completions: Sequence[list[int]], groups: Sequence[int], packing: Packing, device: torch.device
) -> PackedTokens:
    """Sequences as one model call; none at all gives a one-token call that selects nothing (a rank with nothing left to do)."""
    return pack_tree(prompts, completions, groups, device) if packing == "tree" else pack_padded(prompts, completions, device)


def pack_tree(prompts: Sequence[list[int]], completions: Sequence[list[int]], groups: Sequence[int], device: torch.device) -> PackedTokens:
    """One row that holds the prefix tree; the model must run with a form of training/tree_attention.py."""
    sequences = [(p + c)[:-1] for p, c in zip(prompts, completions, strict=True)]
    tree = build_tree(sequences or [[0]], groups or [0])
    predictors = [path[len(p) - 1 :] for p, path in zip(prompts, tree.paths, strict=False)]
    nodes, rows = np.unique(np.concatenate(predictors or [np.zeros(0, dtype=np.int64)]), return_inverse=True)
    inputs = {
        "input_ids": torch.from_numpy(tree.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(tree.depths)[None].to(device),
        "logits_to_keep": torch.from_numpy(nodes if len(nodes) else np.zeros(1, dtype=np.int64)).to(device),
        "tree": tree_layout(tree, device),
    }
    return _packed(inputs, rows, completions, len(tree.token_ids), device)


def pack_padded(prompts: Sequence[list[int]], completions: Sequence[list[int]], device: torch.device) -> PackedTokens:
    """One right-padded row a sample: for models whose attention cannot be told of a tree."""
    sequences = [(p + c)[:-1] for p, c in zip(prompts, completions, strict=True)] or [[0]]
    longest = max(map(len, sequences))
    first = min((len(p) - 1 for p in prompts), default=0)
    kept = longest - first
    rows = [
        b * kept + np.arange(len(p) - 1 - first, len(p) - 1 - first + len(c))
        for b, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    inputs = {
        "input_ids": torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=device),
        "attention_mask": torch.tensor([[1] * len(s) + [0] * (longest - len(s)) for s in sequences], device=device),
        "logits_to_keep": torch.arange(first, longest, device=device),
    }
    flat = np.concatenate(rows or [np.zeros(0, dtype=np.int64)])
    return _packed(inputs, flat, completions, longest * len(sequences), device)


def _packed(inputs: dict[str, Any], rows: Any, completions: Sequence[list[int]], num_nodes: int, device: torch.device) -> PackedTokens:
    lengths = torch.tensor([len(c) for c in completions], dtype=torch.int64)
    return PackedTokens(
        inputs=inputs,
        rows=torch.from_numpy(rows).to(device),
        targets=torch.tensor([token for c in completions for token in c], dtype=torch.int64, device=device),
        sequences=torch.repeat_interleave(torch.arange(len(completions)), lengths).to(device),
        num_sequences=len(completions),
        num_nodes=num_nodes,
    )


def _sequence(sample: TrainSample) -> list[int]:
    return sample.prompt_token_ids + sample.completion_token_ids


def _common_prefix(samples: Sequence[Item]) -> int:
    prompts = [s.sample.prompt_token_ids for s in samples]
    low, high = min(prompts), max(prompts)
    return next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), min(len(low), len(high)))


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
