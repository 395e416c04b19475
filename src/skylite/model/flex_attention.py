"""Attention over a prefix tree as one call of FlexAttention with a block mask. For a GPU: on a CPU it has no backward pass.

FlexAttention: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention Kernels", arXiv 2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.attention.flex_attention import BlockMask, create_block_mask, flex_attention

from skylite.model.prefix_tree import IntArray
from skylite.model.tree_attention import Scoring, TreeLayout


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scoring: Scoring
) -> Tensor:
    """As grpo.attention.tree_attention."""
    call: Callable[..., Any] = flex_attention
    if query.is_cuda:
        call = _compiled()
    out: Tensor = call(
        query,
        key,
        value,
        score_mod=None if scoring.softcap is None else _capped(scoring.softcap),
        block_mask=_block_mask(layout, scoring.window),
        scale=scoring.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def subtree_ends(depths: IntArray) -> IntArray:
    """[T] of nodes in depth-first order: one past the last node below each, so that q sees k where k <= q < ends[k]."""
    ends, open_nodes = np.full(len(depths), len(depths), dtype=np.int64), list[int]()
    for node, depth in enumerate(depths.tolist()):
        while open_nodes and depths[open_nodes[-1]] >= depth:
            ends[open_nodes.pop()] = node
        open_nodes.append(node)
    return ends


@cache
def _compiled() -> Callable[..., Any]:
    """Not compiled, FlexAttention computes every score. Dynamic shapes: no two micro-batches have the same length."""
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _capped(softcap: float) -> Callable[..., Tensor]:
    return lambda score, batch, head, q, k: softcap * torch.tanh(score / softcap)


def _block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    """Made once for all layers that look as far."""
    if window not in layout.block_masks:
        depths = layout.depths
        ends = torch.from_numpy(subtree_ends(depths.cpu().numpy())).to(depths.device)

        def sees(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            is_above = (k <= q) & (q < ends[k])
            return is_above if window is None else is_above & (depths[q] - depths[k] < window)

        layout.block_masks[window] = create_block_mask(
            sees, None, None, len(depths), len(depths), device=depths.device
        )
    mask: BlockMask = layout.block_masks[window]
    return mask
