"""Attention over a prefix tree, piece by piece: each over the pieces that it sees whole and over itself."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor

from skylite.model.prefix_tree import Tree

FLASH = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward


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
    block_masks: dict[int | None, Any] = field(default_factory=dict)
    """FlexAttention's, by window (flex.py)."""

    def seen(self, index: int) -> list[int]:
        """The pieces that a piece sees, itself last."""
        return [*self.above[index], index]


def tree_layout(tree: Tree, device: torch.device) -> TreeLayout:
    """Masks and depths as tensors."""
    masks = [torch.from_numpy(p.mask).to(device) for p in tree.pieces]
    depths = torch.from_numpy(tree.depths).to(device)
    return TreeLayout(
        [len(m) for m in masks], [p.above for p in tree.pieces], masks, depths, int(tree.depths.max())
    )


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a model's layer scores what a token sees."""

    scaling: float
    window: int | None = None
    """A token sees ancestors less than this many positions away."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap)."""


def tree_attention(query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, scoring: Scoring) -> Tensor:
    """query [1, H, T, D], key and value [1, K, T, D] with K dividing H -> [1, T, H, D]."""
    biases = _additive_masks(layout, scoring.window, query.dtype)
    if query.device.type == "cpu" and scoring.softcap is None:
        out: Tensor = _CpuTreeAttention.apply(query, key, value, layout, biases, scoring.scaling)  # type: ignore[no-untyped-call]
        return out
    repeats = query.shape[1] // key.shape[1]
    key, value = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value))
    # split and cat, not slices: the gradient of a slice is a zero tensor of the whole length, one for each block.
    queries, keys, values = (torch.split(x, layout.sizes, dim=2) for x in (query, key, value))
    outputs = []
    for index, bias in enumerate(biases):
        k, v = (_seen(x, layout, index) for x in (keys, values))
        outputs.append(_attend(queries[index], k, v, bias, scoring))
    return torch.cat(outputs, dim=2).transpose(1, 2)


class _CpuTreeAttention(torch.autograd.Function):
    """Keeps query, key, value and the output once. Autograd would keep a copy of key and value for every head and every branch."""

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: TreeLayout,
        biases: list[Tensor],
        scaling: float,
    ) -> Tensor:
        query, key, value = (_alone(x) for x in (query, key, value))
        _, heads, num_tokens, size = query.shape
        out = query.new_empty(1, num_tokens, heads, size)
        parts = zip(
            *(
                torch.split(_by_key_head(x, key.shape[1]), layout.sizes, dim=2)
                for x in (query, out.transpose(1, 2))
            ),
            strict=True,
        )
        keys, values = (torch.split(x, layout.sizes, dim=2) for x in (key, value))
        normalizers = []
        for index, (q, o) in enumerate(parts):
            if not layout.sizes[index]:
                normalizers.append(query.new_empty(0))
                continue
            k, v = (_seen(x, layout, index).expand(len(q), -1, -1, -1) for x in (keys, values))
            found, normalizer = FLASH(q, k, v, attn_mask=biases[index], scale=scaling)
            o.copy_(found)
            normalizers.append(normalizer)
        ctx.save_for_backward(query, key, value, out, *normalizers)
        ctx.layout, ctx.biases, ctx.scaling = layout, biases, scaling
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *normalizers = ctx.saved_tensors
        layout: TreeLayout = ctx.layout
        of_query, of_key, of_value = torch.empty_like(query), torch.zeros_like(key), torch.zeros_like(value)
        rows = (query, grad.transpose(1, 2), out.transpose(1, 2), of_query)
        parts = zip(
            *(torch.split(_by_key_head(x, key.shape[1]), layout.sizes, dim=2) for x in rows), strict=True
        )
        keys, values, of_keys, of_values = (
            torch.split(x, layout.sizes, dim=2) for x in (key, value, of_key, of_value)
        )
        for index, (q, g, o, dq) in enumerate(parts):
            if not layout.sizes[index]:
                continue
            k, v = (_seen(x, layout, index).expand(len(q), -1, -1, -1) for x in (keys, values))
            found = FLASH_BACKWARD(
                g, q, k, v, o, normalizers[index], 0.0, False, attn_mask=ctx.biases[index], scale=ctx.scaling
            )
            dq.copy_(found[0])
            for whole, dx in ((of_keys, found[1]), (of_values, found[2])):
                seen = layout.seen(index)
                for piece, part in zip(
                    seen, torch.split(dx.sum(0), [layout.sizes[i] for i in seen], dim=1), strict=True
                ):
                    whole[piece][0].add_(part)
        return of_query, of_key, of_value, None, None, None


def _alone(x: Tensor) -> Tensor:
    """x, copied where it is a part of something larger, which keeping x would keep."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _by_key_head(x: Tensor, num_key_heads: int) -> Tensor:
    """[1, H, T, D] -> a view [H / K, K, T, D]: the query heads of one key head lie along the batch, where a key is not copied for each."""
    return x[0].view(num_key_heads, -1, *x.shape[2:]).transpose(0, 1)


def _seen(parts: tuple[Tensor, ...], layout: TreeLayout, index: int) -> Tensor:
    """The keys or values [1, K, n, D] that a piece sees."""
    seen = layout.seen(index)
    return parts[index] if len(seen) == 1 else torch.cat([parts[i] for i in seen], dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, scoring: Scoring) -> Tensor:
    if scoring.softcap is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=scoring.scaling)
    scores = (
        torch.tanh(query @ key.transpose(2, 3) * (scoring.scaling / scoring.softcap)) * scoring.softcap + bias
    )
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
                columns = torch.cat([depths[i] for i in layout.seen(index)])
                mask = mask & (depths[index][:, None] - columns < window)
            biases.append(
                torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, float("-inf"))
            )
        layout.bias_cache[window, dtype] = biases
    return layout.bias_cache[window, dtype]
