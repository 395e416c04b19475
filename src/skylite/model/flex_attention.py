"""Attention over a prefix tree as one FlexAttention call with a block mask. GPU only: on a CPU it has no
backward.

FlexAttention: Dong et al. 2024, "Flex Attention: A Programming Model for Generating Optimized Attention
Kernels", arXiv 2412.05496.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
import torch._functorch.config
import torch.fx.experimental._config
from torch import Tensor
from torch._dynamo.exc import FailOnRecompileLimitHit, TorchDynamoException
from torch.nn.attention.flex_attention import AuxRequest, BlockMask, flex_attention

from skylite.errors import ModelError
from skylite.model.tree_attention import ModelMask, ScoreSettings, TreeLayout, group_by_key_head

BLOCK = 128
"""Nodes on each side of a block of scores: FlexAttention's own default."""

MOST_GRAPHS = 64
"""Most forms of the call that torch compiles. A plain model needs about six, each kind of mask three more."""

KERNEL_OPTIONS: dict[str, Any] = {"BACKEND": "TRITON"}
"""Not flex decoding, torch's choice below 128 queries: one kind of kernel for all lengths."""

FLOAT32_OPTIONS = KERNEL_OPTIONS | {"fwd_BLOCK_M": 32, "fwd_BLOCK_N": 32, "fwd_num_stages": 1}
"""For the probe and the canary, which compute in float32: tiles that fit on a GPU for heads of any size."""


def flex_tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, settings: ScoreSettings
) -> Tensor:
    """Same arguments and result as `tree_attention` (model/tree_attention.py)."""
    attention: Any = _compiled() if query.is_cuda else flex_attention
    # Query heads that share a key head form a batch. As grouped heads, one thread block of the backward would
    # go through all their queries in turn: eight completions times seven heads, for the nodes of a prompt.
    queries = group_by_key_head(query, key.shape[1])
    keys, values = (x.expand(len(queries), -1, -1, -1) for x in (key, value))
    sinks = settings.sinks
    attended: Any = attention(
        queries,
        keys,
        values,
        score_mod=None if settings.softcap is None else _softcap(settings.softcap),
        block_mask=_block_mask(layout, settings.mask),
        scale=settings.scaling,
        kernel_options=FLOAT32_OPTIONS if query.dtype == torch.float32 else KERNEL_OPTIONS,
        return_aux=None if sinks is None else AuxRequest(lse=True),
    )
    if sinks is None:
        out: Tensor = attended
    else:
        out, normalizer = attended[0], attended[1].lse
        by_head = sinks.view(key.shape[1], -1).T[:, :, None].to(normalizer.dtype)
        # One more key of value 0 with the head's sink as its score: a factor on the output.
        out = out * torch.sigmoid(normalizer - by_head)[..., None].to(out.dtype)
    return out.permute(2, 1, 0, 3).flatten(1, 2)[None]


@cache
def _compiled() -> Callable[..., Any]:
    """Compiled FlexAttention skips masked blocks; uncompiled it computes every score.

    torch compiles in the first call with new arguments, not in torch.compile, so its settings are set around
    each call. Dynamic shapes, because micro-batches differ in length; they also make a symbol of the float
    that _softcap captures, and Inductor cannot lower it. fullgraph makes the limit of graphs an error: else
    torch would compute every score. Without use_duck_shape a mask of as many blocks as there are heads is no
    form of its own. The backward is compiled with the forward, so that it fails there too.
    """
    compiled: Callable[..., Any] = torch.compile(flex_attention, dynamic=True, fullgraph=True)
    dynamo = torch._dynamo.config.patch(
        specialize_float=True, recompile_limit=MOST_GRAPHS, accumulated_recompile_limit=4 * MOST_GRAPHS
    )
    functorch = torch._functorch.config.patch(force_non_lazy_backward_lowering=True)
    fx: Any = torch.fx.experimental._config
    shapes = fx.patch(use_duck_shape=False)

    def attention(*args: Any, **kwargs: Any) -> Any:
        try:
            with dynamo, functorch, shapes:
                return compiled(*args, **kwargs)
        except (TorchDynamoException, FailOnRecompileLimitHit) as error:
            line = " ".join(str(error).split("\n")[:2])  # the rest is the graph and the compiler's stack
            raise ModelError(
                f"torch could not compile FlexAttention: {line}", "Set trainer.attention=sdpa."
            ) from error

    return attention


@cache
def _softcap(softcap: float) -> Callable[..., Tensor]:
    return lambda score, batch, head, q, k: softcap * torch.tanh(score / softcap)


def _block_mask(layout: TreeLayout, mask: ModelMask | None) -> BlockMask:
    """The blocks of a mask, built once in a pass for all layers that use it."""
    if mask not in layout.masks:
        layout.masks[mask] = block_mask(layout.depths, layout.ends, layout.needed(mask))
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

    places, last = depths.int(), ends.int()  # the kernels compare these, and int64 takes two instructions

    def is_visible(batch: Tensor, head: Tensor, q: Tensor, k: Tensor) -> Tensor:
        is_ancestor = (k <= q) & (q < last[k])
        row = batch * 0  # there is one row of tokens; the batch is of heads
        return is_ancestor if mask is None else is_ancestor & mask.sees(row, head, places[q], places[k])

    return BlockMask.from_kv_blocks(
        *_ordered(visited & ~full),
        *_ordered(full),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_visible,
        seq_lengths=(num_nodes, num_nodes),
    )


def _block_bounds(values: Tensor) -> tuple[Tensor, Tensor]:
    """The smallest and the largest value of each block of nodes, of two blocks at least.

    torch would compile a mask of one block separately. No query and no key is in the second one.
    """
    missing = max(-len(values) % BLOCK, 2 * BLOCK - len(values))
    padded = torch.cat([values, values[-1:].expand(missing)]).view(-1, BLOCK)
    return padded.amin(dim=1), padded.amax(dim=1)


def _ordered(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """For each row of queries, the number of key blocks and their indices, in BlockMask's form."""
    counts = blocks.sum(dim=1, dtype=torch.int32)
    indices = torch.argsort(blocks.int(), dim=1, descending=True, stable=True).int()
    return counts[None, None], indices[None, None].contiguous()
