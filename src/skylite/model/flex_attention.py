"""Attention over a prefix tree as one FlexAttention call with a block mask. GPU only: on a CPU it has no
backward. What it buys beside one call per piece is not measured: that needs a GPU.

FlexAttention: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", arXiv 2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from skylite.model.tree_attention import ModelMask, ScoreSettings, TreeLayout

BLOCK = 128
"""Nodes on each side of a block of scores: FlexAttention's own default."""


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, settings: ScoreSettings
) -> Tensor:
    """Same arguments and result as `tree_attention` (model/tree_attention.py)."""
    attention: Any = _compiled() if query.is_cuda else flex_attention
    sinks = settings.sinks
    attended: Any = attention(
        query,
        key,
        value,
        score_mod=None if settings.softcap is None else _softcap(settings.softcap),
        block_mask=_block_mask(layout, settings.mask),
        scale=settings.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
        # Not flex decoding, torch's choice below 128 queries: with grouped heads its tiles exceed BLOCK.
        kernel_options={"BACKEND": "TRITON"},
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        out: Tensor = attended
    else:
        out, normalizer = attended[0], attended[1].lse
        # One more key of value 0 with the head's sink as its score: a factor on the output.
        out = out * torch.sigmoid(normalizer - sinks.to(normalizer.dtype)[:, None])[..., None].to(out.dtype)
    return out.transpose(1, 2)


@cache
def _compiled() -> Callable[..., Any]:
    """Compiled FlexAttention skips masked blocks; uncompiled it computes every score.

    Dynamic shapes, because micro-batches differ in length.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)

    def attention(*args: Any, **kwargs: Any) -> Any:
        # Dynamic shapes also make a symbol of the float that _softcap captures, and Inductor cannot lower it.
        # Around each call, because torch compiles in the first call with new arguments, not in torch.compile.
        with torch._dynamo.config.patch(specialize_float=True):
            return compiled(*args, **kwargs)

    return attention


def _softcap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, batch, head, q, k: softcap * torch.tanh(score / softcap)


def _block_mask(layout: TreeLayout, mask: ModelMask | None) -> BlockMask:
    """The blocks of a mask, built once in a pass for all layers that use it."""
    mask = layout.needed(mask)
    if mask not in layout.masks:
        layout.masks[mask] = block_mask(layout.depths, layout.ends, mask)
    blocks: BlockMask = layout.masks[mask]
    return blocks


def block_mask(depths: Tensor, ends: Tensor, mask: ModelMask | None) -> BlockMask:
    """The mask of a tree from the bounds of its blocks of nodes, without comparing pairs of nodes.

    A block of keys before a block of queries holds an ancestor if a subtree in it reaches the first query,
    and is completely visible if all its subtrees reach past the last query. A mask by distance hides a block
    if it hides the nearest pair of positions, and nothing of it if it shows the farthest pair. A block may be
    visited although every key is hidden: FlexAttention then masks each score.

    Args:
        depths: [T]
        ends: [T] as in Tree.
        mask: as in ScoreSettings.
    """
    num_nodes, device = len(depths), depths.device
    first_end, last_end = _block_bounds(ends)
    lowest, highest = _block_bounds(depths)
    blocks = torch.arange(len(first_end), device=device)
    queries, keys = blocks[:, None] * BLOCK, blocks * BLOCK
    visited = (keys == queries) | ((keys < queries) & (last_end > queries))
    full = (keys < queries) & (first_end >= queries + BLOCK) & (queries + BLOCK <= num_nodes)
    if mask is not None:
        visited &= (lowest[:, None] <= highest) | mask(lowest[:, None], highest)
        full &= mask(highest[:, None], lowest)

    def is_visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_ancestor = (k <= q) & (q < ends[k])
        return is_ancestor if mask is None else is_ancestor & mask.sees(batch, head, depths[q], depths[k])

    return BlockMask.from_kv_blocks(
        *_ordered(visited & ~full),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_nodes, num_nodes),
    )


def _block_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each block of nodes."""
    missing = -len(values) % BLOCK
    padded = torch.cat([values, values[-1:].expand(missing)]).view(-1, BLOCK)
    return padded.amin(dim=1), padded.amax(dim=1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of queries, the number of key blocks and their indices, in BlockMask's form."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indices = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()
