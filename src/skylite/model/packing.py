"""Packs token sequences into one model call: a prefix tree in one row, or right-padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skylite.model.prefix_tree import build_tree
from skylite.model.tree_attention import TreeLayout, tree_layout
from skylite.types import IntArray

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int64)
Packing = Literal["tree", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Sequences as one model call. [C]: the completion tokens of all sequences, sequence after sequence."""

    inputs: dict[str, Any]
    """Tensors of the model's arguments, and the layout of the tree; see `model_inputs`."""
    rows: Tensor
    """[C] row of the flattened logits that predicts the token."""
    targets: Tensor
    """[C] token id."""
    segments: Tensor
    """[C] int64, segment of the token. A segment is one or several sequences: the calls of a trajectory."""
    num_segments: int
    num_nodes: int
    """Tokens the model computes, padding included."""
    tokens_before: IntArray
    """[N + 1] for each row of the flattened logits and for their end, the number of tokens that earlier rows
    predict. On the host, so that cutting the rows into chunks does not wait for the device."""

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for one pass of the model. A tree gets no masks from another pass."""
        tree: TreeLayout | None = self.inputs.get("tree")
        return self.inputs if tree is None else self.inputs | {"tree": tree.for_one_pass()}


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
        groups: the group of each sequence. In a tree, sequences of one group share every common prefix, and
            those of several groups a long one (prefix_tree.py).
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
    nodes, rows = np.unique(np.concatenate(predictors or [NO_TOKENS]), return_inverse=True)
    kept = nodes if len(nodes) else np.zeros(1, dtype=np.int64)
    (input_ids, depths, ends, logits_to_keep), tokens = _packed(
        [tree.token_ids, tree.depths, tree.ends, kept], rows, len(kept), completions, segments, device
    )
    inputs = {
        "input_ids": input_ids[None],
        "position_ids": depths[None],
        "logits_to_keep": logits_to_keep,
        "tree": tree_layout(tree, depths, ends),
    }
    return PackedTokens(inputs=inputs, num_nodes=len(tree.token_ids), **tokens)


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
    ids = np.array([s + [0] * (longest - len(s)) for s in sequences])
    mask = np.array([[1] * len(s) + [0] * (longest - len(s)) for s in sequences])
    flat, num_rows = np.concatenate(rows or [NO_TOKENS]), kept * len(sequences)
    arrays, tokens = _packed(
        [ids, mask, np.arange(first, longest)], flat, num_rows, completions, segments, device
    )
    inputs = dict(zip(("input_ids", "attention_mask", "logits_to_keep"), arrays, strict=True))
    return PackedTokens(inputs=inputs, num_nodes=ids.size, **tokens)


def upload(arrays: Sequence[npt.NDArray[Any]], device: torch.device) -> list[Tensor]:
    """The arrays as tensors on the device, copied in one piece. Those with wider elements come first."""
    as_bytes = [np.ascontiguousarray(a).reshape(-1).view(np.uint8) for a in arrays]
    joined = torch.from_numpy(np.concatenate([np.zeros(0, dtype=np.uint8), *as_bytes]))
    if device.type == "cuda":
        joined = joined.pin_memory()  # without it, the copy waits for the device
    parts = torch.split(joined.to(device, non_blocking=True), [a.nbytes for a in arrays])
    return [
        # A part without bytes cannot be viewed as another type.
        (part.view(dtype) if a.size else part.to(dtype)).view(a.shape)
        for part, a in zip(parts, arrays, strict=True)
        for dtype in [getattr(torch, a.dtype.name)]
    ]


def _packed(
    arrays: list[IntArray],
    rows: IntArray,
    num_rows: int,
    completions: Sequence[list[int]],
    segments: Sequence[int],
    device: torch.device,
) -> tuple[list[Tensor], dict[str, Any]]:
    """`arrays` on the device, and the fields of PackedTokens that follow from the completions."""
    targets = np.array([token for c in completions for token in c], dtype=np.int64)
    lengths = np.array([len(c) for c in completions], dtype=np.int64)
    by_token = np.repeat(np.array(segments, dtype=np.int64), lengths)
    *arrays_there, rows_there, targets_there, segments_there = upload(
        [*arrays, rows, targets, by_token], device
    )
    return arrays_there, {
        "rows": rows_there,
        "targets": targets_there,
        "segments": segments_there,
        "num_segments": max(segments, default=-1) + 1,
        "tokens_before": tokens_before(rows, num_rows),
    }


def tokens_before(rows: IntArray, num_rows: int) -> IntArray:
    """[num_rows + 1], see PackedTokens."""
    return np.concatenate([NO_TOKENS, [0], np.cumsum(np.bincount(rows, minlength=num_rows))])
