"""Samples as a prefix tree: a token that several samples share, in the same place after the same tokens, is computed once.

Most of a step is shared: the worked examples by all samples, a prompt by its group. The tree has one shared prefix, then one block a
group; a token of a block sees the prefix and its own ancestors in the block, never another block. So attention is computed block
by block over [block, prefix + block] instead of one [T, T] square with nearly everything masked. A block whose branches are long is cut
again, into its trunk and each branch over [branch, prefix + trunk + branch].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor

IntArray = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]
CALL = 16384
"""Scores that may as well be computed as one attention call more be made."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Nodes in a row whose attention is one call."""

    above: tuple[int, ...]
    """Indices of the pieces that all of its nodes see whole, from the root down."""
    mask: BoolArray
    """[n, nodes above + n], True where the column is the row itself or its ancestor."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in depth-first order: parents before children, the shared prefix first, then block after block."""

    token_ids: IntArray
    """[T]"""
    depths: IntArray
    """[T] distance from the root = the token's position in its sequence."""
    paths: list[IntArray]
    """For each given sequence the node of each of its tokens."""
    pieces: list[Piece]
    """The shared prefix (may be empty), then the blocks, each whole or as trunk and branches; their sizes sum to T."""


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """What attention needs to know of a Tree, on the device."""

    sizes: list[int]
    """Nodes of each piece."""
    above: list[tuple[int, ...]]
    """For each piece those that it sees whole."""
    masks: list[Tensor]
    """Bool [n, keys] for each piece."""
    depths: Tensor
    """[T]"""
    max_depth: int
    bias_cache: dict[Any, list[Tensor]] = field(default_factory=dict)
    """Additive masks by window and dtype: every layer asks for the same ones."""


def build_tree(sequences: Sequence[Sequence[int]], families: Sequence[int]) -> Tree:
    """The tree of `sequences`; those of one family (a group) go to the same blocks, those of different families share the prefix only."""
    order = sorted(range(len(sequences)), key=lambda i: (families[i], sequences[i]))
    arrays = [np.asarray(s, dtype=np.int64) for s in sequences]
    prefix = min(shared_length(arrays[order[0]], a) for a in arrays)
    paths: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    tokens, depths, blocks = [arrays[order[0]][:prefix]], [np.arange(prefix)], list[list[int]]()
    num_nodes, previous = prefix, order[0]
    paths[previous] = np.arange(prefix)
    for i in order:
        same = families[i] == families[previous] and i != order[0]
        shared = max(prefix, shared_length(arrays[previous], arrays[i])) if same else prefix
        new = np.arange(num_nodes, num_nodes + len(arrays[i]) - shared)
        paths[i] = np.concatenate([paths[previous][:shared], new])
        tokens.append(arrays[i][shared:])
        depths.append(np.arange(shared, len(arrays[i])))
        if shared == prefix:
            blocks.append([])
        blocks[-1].append(i)
        num_nodes, previous = num_nodes + len(new), i
    pieces = [Piece((), np.tri(prefix, dtype=np.bool_))]
    for block in blocks:
        pieces += _pieces([paths[i] for i in block], prefix, len(pieces))
    return Tree(np.concatenate(tokens), np.concatenate(depths), paths, pieces)


def shared_length(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Length of the common prefix of two token arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def tree_layout(tree: Tree, device: torch.device) -> TreeLayout:
    """Masks and depths as tensors."""
    masks = [torch.from_numpy(p.mask).to(device) for p in tree.pieces]
    depths = torch.from_numpy(tree.depths).to(device)
    return TreeLayout([len(m) for m in masks], [p.above for p in tree.pieces], masks, depths, int(tree.depths.max()))


def tree_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    layout: TreeLayout,
    *,
    scaling: float,
    window: int | None = None,
    softcap: float | None = None,
) -> Tensor:
    """query [1, H, T, D], key and value [1, K, T, D] with K dividing H -> [1, T, H, D].

    `window`: a token sees ancestors less than this many positions away. `softcap`: scores become softcap * tanh(scores / softcap).
    """
    repeats = query.shape[1] // key.shape[1]
    key, value = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value))
    # split and cat, not slices: the gradient of a slice is a zero tensor of the whole length, one for each block.
    queries, keys, values = (torch.split(x, layout.sizes, dim=2) for x in (query, key, value))
    outputs = []
    for index, bias in enumerate(_additive_masks(layout, window, query.dtype)):
        seen = [*layout.above[index], index]
        k, v = (x[index] if len(seen) == 1 else torch.cat([x[i] for i in seen], dim=2) for x in (keys, values))
        outputs.append(_attend(queries[index], k, v, bias, scaling, softcap))
    return torch.cat(outputs, dim=2).transpose(1, 2)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scaling: float, softcap: float | None) -> Tensor:
    if softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scaling)
    scores = torch.tanh(query @ key.transpose(2, 3) * (scaling / softcap)) * softcap + bias
    return torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype) @ value


def _additive_masks(layout: TreeLayout, window: int | None, dtype: torch.dtype) -> list[Tensor]:
    """0 where attention is allowed and -inf elsewhere, for each piece."""
    if window is not None and window > layout.max_depth:
        window = None
    if (window, dtype) not in layout.bias_cache:
        depths = torch.split(layout.depths, layout.sizes)
        biases = []
        for index, mask in enumerate(layout.masks):
            if window is not None:
                columns = torch.cat([depths[i] for i in (*layout.above[index], index)])
                mask = mask & (depths[index][:, None] - columns < window)
            biases.append(torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf")))
        layout.bias_cache[window, dtype] = biases
    return layout.bias_cache[window, dtype]


def _pieces(paths: list[IntArray], prefix: int, index: int) -> list[Piece]:
    """The block that `paths` (depth-first order) run through below the shared prefix: whole, or cut where that saves more than it costs.

    `index`: of the first piece.
    """
    first = paths[0]
    trunk = min(shared_length(first, path) for path in paths)
    size, branches = _num_nodes(paths, prefix), _branches(paths, trunk)
    sizes = [_num_nodes(branch, trunk) for branch in branches]
    cut = (trunk - prefix) * trunk + sum(n * (trunk + n) for n in sizes)
    if trunk == prefix or size * (prefix + size) - cut < CALL * len(branches):
        whole = _block_mask(paths, prefix)
        return [Piece((0,), whole)] if len(whole) else []
    pieces = [Piece((0,), _block_mask([first[:trunk]], prefix))]
    return pieces + [Piece((0, index), _block_mask(branch, trunk)) for branch in branches]


def _branches(paths: list[IntArray], trunk: int) -> list[list[IntArray]]:
    """`paths` by the first node below the trunk that they all share; one that ends with the trunk has none."""
    longer = [p for p in paths if len(p) > trunk]
    return [list(same) for _, same in itertools.groupby(longer, key=lambda p: int(p[trunk]))]


def _num_nodes(paths: list[IntArray], depth: int) -> int:
    """Nodes below `depth` of paths that follow each other: numbered in a row from the first's."""
    below = [p for p in paths if len(p) > depth]
    return max(int(p[-1]) for p in below) + 1 - min(int(p[depth]) for p in below) if below else 0


def _block_mask(paths: list[IntArray], prefix: int) -> BoolArray:
    """[n, prefix + n] of the nodes that `paths` (depth-first order) run through below the `prefix` nodes that all of them see."""
    first = min((int(p[prefix]) for p in paths if len(p) > prefix), default=0)
    num_nodes = _num_nodes(paths, prefix)
    mask = np.zeros((num_nodes, prefix + num_nodes), dtype=np.bool_)
    mask[:, :prefix] = True
    done = 0
    for path in paths:
        local = path[prefix:] - first
        rows = local[local >= done]
        mask[rows[:, None], prefix + local] = np.tri(len(rows), len(local), len(local) - len(rows), dtype=np.bool_)
        done += len(rows)
    return mask
