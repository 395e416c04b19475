"""Samples as a prefix tree: a token that several samples share, in the same place after the same tokens, is computed once.

Most of a step is shared: the worked examples by all samples, a prompt by its group. The tree has one shared prefix, then one block a
group; a token of a block sees the prefix and its own ancestors in the block, never another block. So attention is computed block
by block over [block, prefix + block] instead of one [T, T] square with nearly everything masked (`model/tree_attention.py`). A block whose
branches are long is cut again, into its trunk and each branch over [branch, prefix + trunk + branch].
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

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
        mask[rows[:, None], prefix + local] = np.tri(
            len(rows), len(local), len(local) - len(rows), dtype=np.bool_
        )
        done += len(rows)
    return mask
