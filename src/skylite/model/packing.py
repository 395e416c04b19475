"""Packs token sequences into one model call: a prefix tree in one row, or right-padded rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from skylite.model.images import ImageCall, ImageReader, ReadImages
from skylite.model.prefix_tree import build_tree
from skylite.model.tree_attention import TreeLayout, tree_layout
from skylite.types import IntArray, TrainingExample

NO_TOKENS: IntArray = np.zeros(0, dtype=np.int64)
Packing = Literal["tree", "padded"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedTokens:
    """Examples as one model call. [C]: the tokens with a weight, example after example."""

    inputs: dict[str, Any]
    """Tensors of the model's arguments, and the layout of the tree; see `model_inputs`."""
    rows: Tensor
    """[C] row of the flattened logits that predicts the token."""
    targets: Tensor
    """[C] token id."""
    segments: Tensor
    """[C] int64, segment of the token. A segment is a trajectory: the examples of its calls."""
    num_segments: int
    num_nodes: int
    """Tokens the model computes, padding included."""
    tokens_before: IntArray
    """[N + 1] for each row of the flattened logits and for their end, the number of tokens that earlier rows
    predict. On the host, so that cutting the rows into chunks does not wait for the device."""
    images: ImageCall | None = None

    def model_inputs(self) -> dict[str, Any]:
        """Keyword arguments for one pass of the model. A tree gets no masks from another pass."""
        tree: TreeLayout | None = self.inputs.get("tree")
        inputs = self.inputs if tree is None else self.inputs | {"tree": tree.for_one_pass()}
        return inputs if self.images is None else inputs | {"mm_encoder_outputs": self.images.for_one_pass()}

    def kept(self, outputs: Tensor) -> Tensor:
        """Outputs [B, K, ...] at `logits_to_keep`, which some models ignore: they give [B, L, ...]."""
        positions: Tensor = self.inputs["logits_to_keep"]
        return outputs if outputs.shape[1] == len(positions) else outputs[:, positions]


def pack_tokens(
    examples: Sequence[TrainingExample],
    packing: Packing,
    device: torch.device,
    reader: ImageReader | None = None,
) -> PackedTokens:
    """Pack examples into one model call. `reader`: reads their images.

    In a tree, examples of one group share every common prefix, and those of several groups a long one
    (prefix_tree.py). Those of a trajectory, which stand together, are a segment.

    Without examples, the call has one token and no completion tokens. A rank with an empty micro-batch needs
    it, because FSDP requires the same number of calls on every rank.
    """
    images = reader.read(examples) if reader is not None else None
    return (pack_tree if packing == "tree" else pack_padded)(examples, device, images)


def pack_tree(
    examples: Sequence[TrainingExample], device: torch.device, images: ReadImages | None = None
) -> PackedTokens:
    """One row with the prefix tree. Needs an attention backend for trees (attention_backends.py)."""
    scored = [e.scored for e in examples]
    sequences = [e.keys[: s[-1]] for e, s in zip(examples, scored, strict=True)]
    tree = build_tree(sequences or [np.zeros(1, dtype=np.int64)], [e.group for e in examples] or [0])
    token_ids, positions = tree.token_ids, tree.depths[None]
    if images is not None:
        token_ids, positions = tree.token_ids.copy(), np.repeat(positions, 4, axis=0)
        for example, path in zip(examples, tree.paths, strict=True):
            token_ids[path] = example.token_ids[: len(path)]
            positions[1:, path] = images.positions(example)[:, : len(path)]
    predictors = [path[s - 1] for path, s in zip(tree.paths, scored, strict=False)]
    nodes, rows = np.unique(np.concatenate(predictors or [NO_TOKENS]), return_inverse=True)
    kept = nodes if len(nodes) else np.zeros(1, dtype=np.int64)
    (input_ids, depths, position_ids, ends, logits_to_keep), tokens = _packed(
        [token_ids, tree.depths, positions, tree.ends, kept], rows, len(kept), examples, scored, device
    )
    inputs = {
        "input_ids": input_ids[None],
        # With images: for masks as without, then on the three axes of mRoPE.
        "position_ids": position_ids if images is None else position_ids[:, None],
        # Otherwise transformers takes the positions of a tree for packed sequences, and masks those.
        "attention_mask": torch.ones_like(input_ids[None]),
        "logits_to_keep": logits_to_keep,
        "tree": tree_layout(tree, depths, ends),
    }
    call = None if images is None else images.call(token_ids, tree.token_ids)
    return PackedTokens(inputs=inputs, num_nodes=len(tree.token_ids), images=call, **tokens)


def pack_padded(
    examples: Sequence[TrainingExample], device: torch.device, images: ReadImages | None = None
) -> PackedTokens:
    """One right-padded row per example, for models without tree attention."""
    scored = [e.scored for e in examples]
    sequences = [e.token_ids[: s[-1]] for e, s in zip(examples, scored, strict=True)]
    sequences = sequences or [np.zeros(1, dtype=np.int64)]
    longest = max(map(len, sequences))
    first = min((int(s[0]) - 1 for s in scored), default=0)
    kept = longest - first
    rows = [b * kept + s - 1 - first for b, s in enumerate(scored)]
    ids, mask = (np.zeros((len(sequences), longest), dtype=np.int64) for _ in range(2))
    for row, sequence in enumerate(sequences):
        ids[row, : len(sequence)], mask[row, : len(sequence)] = sequence, 1
    flat, num_rows = np.concatenate(rows or [NO_TOKENS]), kept * len(sequences)
    values = {"input_ids": ids, "attention_mask": mask, "logits_to_keep": np.arange(first, longest)}
    call = None
    if images is not None:
        values["position_ids"], keys = np.zeros((3, *ids.shape), dtype=np.int64), ids.copy()
        for row, (example, sequence) in enumerate(zip(examples, sequences, strict=True)):
            length = len(sequence)
            values["position_ids"][:, row, :length] = images.positions(example)[:, :length]
            keys[row, :length] = example.keys[:length]
        call = images.call(ids.flatten(), keys.flatten())
    arrays, tokens = _packed(list(values.values()), flat, num_rows, examples, scored, device)
    inputs = dict(zip(values, arrays, strict=True))
    return PackedTokens(inputs=inputs, num_nodes=ids.size, images=call, **tokens)


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
    examples: Sequence[TrainingExample],
    scored: Sequence[IntArray],
    device: torch.device,
) -> tuple[list[Tensor], dict[str, Any]]:
    """`arrays` on the device, and the fields of PackedTokens that follow from the scored tokens."""
    targets = np.concatenate([NO_TOKENS, *(e.token_ids[s] for e, s in zip(examples, scored, strict=True))])
    places = [(e.group, e.trajectory) for e in examples]
    segments = np.cumsum([0, *(int(a != b) for a, b in pairwise(places))])[: len(examples)]
    by_token = np.repeat(segments, [len(s) for s in scored])
    *arrays_there, rows_there, targets_there, segments_there = upload(
        [*arrays, rows, targets, by_token], device
    )
    return arrays_there, {
        "rows": rows_there,
        "targets": targets_there,
        "segments": segments_there,
        "num_segments": int(segments[-1]) + 1 if len(segments) else 0,
        "tokens_before": tokens_before(rows, num_rows),
    }


def tokens_before(rows: IntArray, num_rows: int) -> IntArray:
    """[num_rows + 1], see PackedTokens."""
    return np.concatenate([NO_TOKENS, [0], np.cumsum(np.bincount(rows, minlength=num_rows))])
