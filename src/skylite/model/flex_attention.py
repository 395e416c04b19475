"""Attention over a prefix tree as one FlexAttention call with a block mask. GPU only: on a CPU it has no
backward.

FlexAttention: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", arXiv 2412.05496.
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
from skylite.model.tree_attention import ScoreSettings, TreeLayout


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, settings: ScoreSettings
) -> Tensor:
    """Same arguments and result as `tree_attention` (model/tree_attention.py)."""
    attention: Any = _compiled() if query.is_cuda else flex_attention
    out: Tensor = attention(
        query,
        key,
        value,
        score_mod=None if settings.softcap is None else _softcap(settings.softcap),
        block_mask=_block_mask(layout, settings.window),
        scale=settings.scaling,
        enable_gqa=query.shape[1] != key.shape[1],
    )
    return out.transpose(1, 2)


def subtree_ends(depths: IntArray) -> IntArray:
    """[T]: one past the last descendant of each node, for nodes in depth-first order.

    So query q sees key k if k <= q < ends[k].
    """
    ends, open_nodes = np.full(len(depths), len(depths), dtype=np.int64), list[int]()
    for node, depth in enumerate(depths.tolist()):
        while open_nodes and depths[open_nodes[-1]] >= depth:
            ends[open_nodes.pop()] = node
        open_nodes.append(node)
    return ends


@cache
def _compiled() -> Callable[..., Any]:
    """Compiled FlexAttention skips masked blocks; uncompiled it computes every score.

    Dynamic shapes, because micro-batches differ in length.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True)
    return compiled


def _softcap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, batch, head, q, k: softcap * torch.tanh(score / softcap)


def _block_mask(layout: TreeLayout, window: int | None) -> BlockMask:
    """The mask of a sliding window, built once for all layers that use it."""
    if window not in layout.block_masks:
        depths = layout.depths
        ends = torch.from_numpy(subtree_ends(depths.cpu().numpy())).to(depths.device)

        def is_visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
            is_ancestor = (k <= q) & (q < ends[k])
            return is_ancestor if window is None else is_ancestor & (depths[q] - depths[k] < window)

        layout.block_masks[window] = create_block_mask(
            is_visible, None, None, len(depths), len(depths), device=depths.device
        )
    mask: BlockMask = layout.block_masks[window]
    return mask
