"""Builds the prefix tree of token sequences, so that a token that several sequences share is computed once.

Most tokens of a step are shared: all prompts share the few-shot examples, and a group shares its prompt. The
tree has one shared prefix, followed by blocks: the sequences of a group, or of several that share much more,
such as all calls of a sub-agent with a system prompt of its own. A token of a block sees the
shared prefix and its own ancestors in the block, never another block. So attention runs block by block over
[block, prefix + block] instead of over one [T, T] square that is almost entirely masked
(model/tree_attention.py). A block with long branches is cut again, into its trunk and its branches, each
branch over [branch, prefix + trunk + branch], and so on down the tree.

model/packing.py makes the model's input of a tree.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from skylite.types import IntArray

Tokens = Sequence[int] | IntArray
SCORES_PER_CALL = 16384
"""Overhead of one attention call, as the number of attention scores that cost the same time.

The cut buys time at 512 tokens, measured on a busy machine only; at 128 tokens it buys none
(benchmarks/NOTES.md).
"""


SHARED_BY_GROUPS = 64
"""Sequences of two groups share what follows the prefix of all if it has so many tokens. Two prompts often
begin with the same few words; sharing those would cost an attention call for each beginning."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Consecutive nodes whose attention is one call."""

    ancestors: tuple[int, ...]
    """Indices of the pieces that every node of this piece sees completely, from the root down.

    Together they form a chain from the root, so their nodes have the depths 0, 1, 2 and so on.
    """
    size: int
    """Number of nodes."""
    is_chain: bool
    """Whether each node is the parent of the next one."""


@dataclass(frozen=True, slots=True)
class Tree:
    """Nodes in depth-first order: parents before children, the shared prefix first, then the blocks."""

    token_ids: IntArray
    """[T]"""
    depths: IntArray
    """[T] distance from the root, which is the token's position in its sequence."""
    ends: IntArray
    """[T] one past the node's last descendant. So node q sees node k if k <= q < ends[k]."""
    paths: list[IntArray]
    """The nodes of each given sequence, in order."""
    pieces: list[Piece]
    """The shared prefix (may be empty), then the blocks, each one piece or trunk, branches, and so on."""


@dataclass(frozen=True, slots=True)
class Member:
    """One path of a block."""

    path: IntArray
    shared: int
    """Nodes in common with the path before it. Kept, so that no cut compares paths again."""


def build_tree(sequences: Sequence[Tokens], groups: Sequence[int]) -> Tree:
    """The prefix tree of `sequences`, of which some share nodes (`find_sharing`)."""
    arrays = [np.asarray(s, dtype=np.int64) for s in sequences]
    order, prefix, lengths = find_sharing(arrays, groups)
    paths: list[IntArray] = [np.empty(0, dtype=np.int64)] * len(sequences)
    ends = np.full(sum(map(len, arrays)), -1, dtype=np.int64)
    tokens, depths, blocks = [arrays[order[0]][:prefix]], [np.arange(prefix)], list[list[int]]()
    num_nodes, previous = prefix, order[0]
    paths[previous] = np.arange(prefix)
    for i in order:
        shared = lengths[i]
        ends[paths[previous][shared:]] = num_nodes
        new = np.arange(num_nodes, num_nodes + len(arrays[i]) - shared)
        paths[i] = np.concatenate([paths[previous][:shared], new])
        tokens.append(arrays[i][shared:])
        depths.append(np.arange(shared, len(arrays[i])))
        if shared == prefix:
            blocks.append([])
        blocks[-1].append(i)
        num_nodes, previous = num_nodes + len(new), i
    ends = np.where(ends[:num_nodes] < 0, num_nodes, ends[:num_nodes])
    pieces = [Piece((), prefix, is_chain=True)]
    for block in blocks:
        members = [Member(paths[i], lengths[i]) for i in block]
        pieces += _block_pieces(members, prefix, (0,), len(pieces))
    return Tree(np.concatenate(tokens), np.concatenate(depths), ends, paths, pieces)


def tree_size(sequences: Sequence[Tokens], groups: Sequence[int]) -> int:
    """The number of nodes of `build_tree`, without building it."""
    return tree_work(sequences, groups)[0]


def tree_work(sequences: Sequence[Tokens], groups: Sequence[int]) -> tuple[int, int]:
    """The nodes of `build_tree`, and the pairs of a node and a node that it attends to, itself included."""
    arrays = [np.asarray(s, dtype=np.int64) for s in sequences]
    _, prefix, lengths = find_sharing(arrays, groups)
    spans = [(0, prefix), *((shared, len(a)) for a, shared in zip(arrays, lengths, strict=True))]
    nodes = sum(end - start for start, end in spans)
    return nodes, sum(end * (end + 1) - start * (start + 1) for start, end in spans) // 2


def find_sharing(arrays: Sequence[IntArray], groups: Sequence[int]) -> tuple[list[int], int, list[int]]:
    """Depth-first order of the sequences, their common prefix, and what each shares with the one before it.

    All share the prefix. Two neighbours share more if they are of one group, or if it is much.
    """
    # Big-endian bytes sort as the numbers do, and far faster than lists.
    keys = [a.astype(">i8").tobytes() for a in arrays]
    order = sorted(range(len(arrays)), key=lambda i: (keys[i], groups[i]))
    prefix = shared_length(arrays[order[0]], arrays[order[-1]])
    lengths = [prefix] * len(arrays)
    for before, i in itertools.pairwise(order):
        shared = shared_length(arrays[before], arrays[i])
        if groups[before] == groups[i] or shared >= prefix + SHARED_BY_GROUPS:
            lengths[i] = shared
    return order, prefix, lengths


def shared_length(a: npt.NDArray[Any], b: npt.NDArray[Any]) -> int:
    """Length of the common prefix of two token arrays."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length


def _block_pieces(
    block: list[Member], depth: int, ancestors: tuple[int, ...], first_index: int
) -> list[Piece]:
    """The pieces of the nodes at `depth` or deeper: a single piece, or trunk and branches, each branch again.

    A cut must save more than its calls cost. Calls of one trajectory that continue each other are one chain,
    which is never cut.

    Args:
        block: consecutive paths in depth-first order, equal up to `depth`.
        ancestors: the pieces above.
        first_index: index of the first piece returned.
    """
    uncut = _piece(ancestors, block, depth)
    if uncut.is_chain:
        return [uncut] if uncut.size else []
    trunk = min(len(block[0].path), *(member.shared for member in block[1:]))
    branches = _branches(block, trunk)
    sizes = [_num_nodes(branch, trunk) for branch in branches]
    split_scores = (trunk - depth) * trunk + sum(n * (trunk + n) for n in sizes)
    saved_scores = uncut.size * (depth + uncut.size) - split_scores
    if trunk == depth or saved_scores < SCORES_PER_CALL * len(branches):
        return [uncut]
    pieces = [Piece(ancestors, trunk - depth, is_chain=True)]
    for branch in branches:
        pieces += _block_pieces(branch, trunk, (*ancestors, first_index), first_index + len(pieces))
    return pieces


def _piece(ancestors: tuple[int, ...], block: list[Member], depth: int) -> Piece:
    """The piece of the nodes at `depth` or deeper on these paths."""
    size = _num_nodes(block, depth)
    return Piece(ancestors, size, is_chain=size == max(len(member.path) for member in block) - depth)


def _branches(block: list[Member], trunk: int) -> list[list[Member]]:
    """`block` grouped by the first node below the trunk. A path that ends there has no branch."""
    longer = [member for member in block if len(member.path) > trunk]
    return [list(branch) for _, branch in itertools.groupby(longer, key=lambda m: int(m.path[trunk]))]


def _num_nodes(block: list[Member], depth: int) -> int:
    """Nodes at `depth` or deeper on consecutive paths, whose nodes are numbered consecutively."""
    below = [member.path for member in block if len(member.path) > depth]
    return max(int(p[-1]) for p in below) + 1 - min(int(p[depth]) for p in below) if below else 0
