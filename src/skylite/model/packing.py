"""Packs token sequences into one model call: a prefix tree in one row, or right-padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from skylite.model.prefix_tree import build_tree
from skylite.model.tree_attention import tree_layout

Packing = Literal["tree", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Sequences as one model call. [C]: the completion tokens of all sequences, sequence after sequence."""

    inputs: dict[str, Any]
    """Keyword arguments of the model."""
    rows: Tensor
    """[C] row of the flattened logits that predicts the token."""
    targets: Tensor
    """[C] token id."""
    segments: Tensor
    """[C] int64, segment of the token. A segment is one or several sequences: the calls of a trajectory."""
    num_segments: int
    num_nodes: int
    """Tokens the model computes, padding included."""


def pack_tokens(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    groups: Sequence[int],
    packing: Packing,
    device: torch.device,
    segments: Sequence[int] | None = None,
) -> PackedTokens:
    """Pack sequences, each a prompt and its completion, into one model call.

    Args:
        groups: the group of each sequence. In a tree, sequences of one group share every common prefix.
        segments: the segment of each sequence, counted from 0; None: each sequence is a segment.

    Without sequences, the call has one token and no completion tokens. A rank with an empty micro-batch needs
    it, because FSDP requires the same number of calls on every rank.
    """
    segments = range(len(prompts)) if segments is None else segments
    if packing == "tree":
        return pack_tree(prompts, completions, groups, segments, device)
    return pack_padded(prompts, completions, segments, device)


def pack_tree(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    groups: Sequence[int],
    segments: Sequence[int],
    device: torch.device,
) -> PackedTokens:
    """One row with the prefix tree. Needs an attention backend for trees (attention_backends.py)."""
    sequences = [(p + c)[:-1] for p, c in zip(prompts, completions, strict=True)]
    tree = build_tree(sequences or [[0]], groups or [0])
    predictors = [
        path[len(p) - 1 :][: len(c)] for p, c, path in zip(prompts, completions, tree.paths, strict=False)
    ]
    nodes, rows = np.unique(np.concatenate(predictors or [np.zeros(0, dtype=np.int64)]), return_inverse=True)
    inputs = {
        "input_ids": torch.from_numpy(tree.token_ids)[None].to(device),
        "position_ids": torch.from_numpy(tree.depths)[None].to(device),
        "logits_to_keep": torch.from_numpy(nodes if len(nodes) else np.zeros(1, dtype=np.int64)).to(device),
        "tree": tree_layout(tree, device),
    }
    return _packed(inputs, rows, completions, segments, len(tree.token_ids), device)


def pack_padded(
    prompts: Sequence[list[int]],
    completions: Sequence[list[int]],
    segments: Sequence[int],
    device: torch.device,
) -> PackedTokens:
    """One right-padded row per sequence, for models without tree attention."""
    sequences = [(p + c)[:-1] for p, c in zip(prompts, completions, strict=True)] or [[0]]
    longest = max(map(len, sequences))
    first = min((len(p) - 1 for p in prompts), default=0)
    kept = longest - first
    rows = [
        b * kept + np.arange(len(p) - 1 - first, len(p) - 1 - first + len(c))
        for b, (p, c) in enumerate(zip(prompts, completions, strict=True))
    ]
    mask = [[1] * len(s) + [0] * (longest - len(s)) for s in sequences]
    inputs = {
        "input_ids": torch.tensor([s + [0] * (longest - len(s)) for s in sequences], device=device),
        "attention_mask": torch.tensor(mask, device=device),
        "logits_to_keep": torch.arange(first, longest, device=device),
    }
    flat = np.concatenate(rows or [np.zeros(0, dtype=np.int64)])
    return _packed(inputs, flat, completions, segments, longest * len(sequences), device)


def _packed(
    inputs: dict[str, Any],
    rows: Any,
    completions: Sequence[list[int]],
    segments: Sequence[int],
    num_nodes: int,
    device: torch.device,
) -> PackedTokens:
    lengths = torch.tensor([len(c) for c in completions], dtype=torch.int64)
    return PackedTokens(
        inputs=inputs,
        rows=torch.from_numpy(rows).to(device),
        targets=torch.tensor([token for c in completions for token in c], dtype=torch.int64, device=device),
        segments=torch.repeat_interleave(torch.tensor(list(segments), dtype=torch.int64), lengths).to(device),
        num_segments=max(segments, default=-1) + 1,
        num_nodes=num_nodes,
    )
