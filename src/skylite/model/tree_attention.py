"""Attention over a prefix tree, one call per piece: each piece attends to its ancestor pieces and to
itself."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 -- torch's own name for it
from torch import Tensor

from skylite.model.prefix_tree import Piece, Tree

FLASH_FORWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
FLASH_BACKWARD = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward

ROW_ELEMENTS = 16
"""Mask rows of other lengths make torch's memory-efficient attention copy the mask in every call."""


@dataclass(frozen=True, slots=True, eq=False)
class ModelMask:
    """The mask of the model's own layers as a function of positions. A pass makes one for each kind of layer.

    It must hide by distance: if a query sees a key, then so does every query between them, and it sees every
    key between them. Causal masks, sliding windows and chunks do.
    """

    sees: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    """(batch, head, position of the query, position of the key) -> bool"""

    def __call__(self, query: Tensor, key: Tensor) -> Tensor:
        """Whether a query at a position sees a key at a position; the shapes are broadcast."""
        zero = query.new_zeros(())
        return self.sees(zero, zero, query, key)

    def hides(self, query: int, key: int) -> bool:
        """Whether it hides one position from another one."""
        return not self(torch.tensor(query), torch.tensor(key))


@dataclass(frozen=True, slots=True)
class TreeLayout:
    """What attention needs of a Tree, on the device, and the masks of one pass of the model."""

    pieces: list[Piece]
    sizes: list[int]
    """Number of nodes of each piece."""
    depths: Tensor
    """[T]"""
    ends: Tensor
    """[T]"""
    max_depth: int
    masks: dict[Any, Any] = field(default_factory=dict)
    """Masks that the layers of a pass share: additive ones by (mask, dtype), FlexAttention's by mask."""

    def visible(self, index: int) -> list[int]:
        """Indices of the pieces that a piece sees; the last is the piece itself."""
        return [*self.pieces[index].ancestors, index]

    def needed(self, mask: ModelMask | None) -> ModelMask | None:
        """The mask, or None if it hides no ancestor in this tree: a window longer than every path."""
        return mask if mask is not None and mask.hides(self.max_depth, 0) else None

    def for_one_pass(self) -> TreeLayout:
        """The layout without masks. The autograd graph of a pass holds its masks, and frees them."""
        return replace(self, masks={})


def tree_layout(tree: Tree, depths: Tensor, ends: Tensor) -> TreeLayout:
    """The layout of a tree. `depths` and `ends` are the tree's, on the device."""
    return TreeLayout(tree.pieces, [p.size for p in tree.pieces], depths, ends, int(tree.depths.max()))


@dataclass(frozen=True, slots=True)
class ScoreSettings:
    """How a layer computes its attention scores."""

    scaling: float
    """Factor on query @ key."""
    mask: ModelMask | None = None
    """What a token sees of its ancestors. None: all."""
    softcap: float | None = None
    """Scores become softcap * tanh(scores / softcap). None: no cap."""
    sinks: Tensor | None = None
    """[H] a score for each head that takes a share of the softmax and adds no value (gpt-oss). None: none."""


def tree_attention(
    query: Tensor, key: Tensor, value: Tensor, layout: TreeLayout, settings: ScoreSettings
) -> Tensor:
    """query [1, H, T, D], key [1, K, T, D], value [1, K, T, V] with K a divisor of H -> [1, T, H, V]."""
    biases = _additive_masks(layout, settings.mask, query.dtype)
    size = value.shape[-1]
    if query.device.type == "cpu" and settings.softcap is None and size <= query.shape[-1]:
        # torch's kernel wants values as wide as keys; those of latent attention are narrower.
        value = F.pad(value, (0, query.shape[-1] - size))
        out: Tensor = _CpuTreeAttention.apply(  # type: ignore[no-untyped-call]
            query, key, value, layout, biases, settings.scaling, settings.sinks
        )
        return out[..., :size]
    repeats = query.shape[1] // key.shape[1]
    key, value = (x if repeats == 1 else x.repeat_interleave(repeats, dim=1) for x in (key, value))
    # split and cat instead of slices: each slice would get a gradient of the full length.
    queries, keys, values = (torch.split(x, layout.sizes, dim=2) for x in (query, key, value))
    outputs = []
    for index, bias in enumerate(biases):
        k, v = (_visible(x, layout, index) for x in (keys, values))
        outputs.append(_attend(queries[index], k, v, bias, settings))
    return torch.cat(outputs, dim=2).transpose(1, 2)


class _CpuTreeAttention(torch.autograd.Function):
    """Saves query, key, value and output once. Autograd would save keys per head and branch.

    Buys memory: without it the peak of a train phase is 22 % higher.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        layout: TreeLayout,
        biases: list[Tensor],
        scaling: float,
        sinks: Tensor | None,
    ) -> Tensor:
        query, key, value = (_with_own_storage(x) for x in (query, key, value))
        _, heads, num_tokens, size = query.shape
        out = query.new_empty(1, num_tokens, heads, size)
        pieces = _split_rows((query, out.transpose(1, 2)), key.shape[1], layout)
        keys, values = (torch.split(x, layout.sizes, dim=2) for x in (key, value))
        normalizers = []
        for index, (q, o) in enumerate(pieces):
            if not layout.sizes[index]:
                normalizers.append(query.new_empty(0))
                continue
            k, v = (_visible(x, layout, index).expand(len(q), -1, -1, -1) for x in (keys, values))
            attended, normalizer = FLASH_FORWARD(q, k, v, attn_mask=biases[index], scale=scaling)
            if sinks is not None:
                attended, normalizer = _with_sinks(attended, normalizer, sinks)
            o.copy_(attended)
            normalizers.append(normalizer)
        ctx.save_for_backward(query, key, value, out, *normalizers)
        ctx.layout, ctx.biases, ctx.scaling = layout, biases, scaling
        return out

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        query, key, value, out, *normalizers = ctx.saved_tensors
        layout: TreeLayout = ctx.layout
        grad_query = torch.empty_like(query)
        grad_key, grad_value = torch.zeros_like(key), torch.zeros_like(value)
        rows = (query, grad.transpose(1, 2), out.transpose(1, 2), grad_query)
        pieces = _split_rows(rows, key.shape[1], layout)
        keys, values, grad_keys, grad_values = (
            torch.split(x, layout.sizes, dim=2) for x in (key, value, grad_key, grad_value)
        )
        for index, (q, g, o, dq) in enumerate(pieces):
            if not layout.sizes[index]:
                continue
            k, v = (_visible(x, layout, index).expand(len(q), -1, -1, -1) for x in (keys, values))
            dq_piece, dk, dv = FLASH_BACKWARD(
                g, q, k, v, o, normalizers[index], 0.0, False, attn_mask=ctx.biases[index], scale=ctx.scaling
            )
            dq.copy_(dq_piece)
            visible = layout.visible(index)
            sizes = [layout.sizes[i] for i in visible]
            for totals, dx in ((grad_keys, dk), (grad_values, dv)):
                for piece, part in zip(visible, torch.split(dx.sum(0), sizes, dim=1), strict=True):
                    totals[piece][0].add_(part)
        return grad_query, grad_key, grad_value, None, None, None, None


def _with_sinks(attended: Tensor, normalizer: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Output and log-sum-exp of attention with one more key of value 0, whose score is the head's sink.

    Backward needs no more than these: with them the kernel's own formula is that of the longer softmax.

    Args:
        attended: [H / K, K, n, D]
        normalizer: [H / K, K, n]
        sinks: [H]
    """
    by_head = sinks.view(normalizer.shape[1], -1).T[:, :, None].to(normalizer.dtype)
    total = torch.logaddexp(normalizer, by_head)
    return attended * torch.exp(normalizer - total)[..., None].to(attended.dtype), total


def _with_own_storage(x: Tensor) -> Tensor:
    """x, copied if it is a view of a larger tensor, because saving a view keeps the larger tensor."""
    return x if x.untyped_storage().nbytes() == x.nbytes else x.clone()


def _split_rows(
    tensors: Sequence[Tensor], num_key_heads: int, layout: TreeLayout
) -> Iterator[tuple[Tensor, ...]]:
    """For each piece, its rows of the tensors [1, H, T, D], with query heads grouped by key head."""
    return zip(
        *(torch.split(group_by_key_head(x, num_key_heads), layout.sizes, dim=2) for x in tensors),
        strict=True,
    )


def group_by_key_head(x: Tensor, num_key_heads: int) -> Tensor:
    """View [1, H, T, D] as [H / K, K, T, D]: query heads that share a key head form a batch."""
    return x[0].view(num_key_heads, -1, *x.shape[2:]).transpose(0, 1)


def _visible(pieces: tuple[Tensor, ...], layout: TreeLayout, index: int) -> Tensor:
    """The keys or values [1, K, n, D] that a piece sees."""
    visible = layout.visible(index)
    return pieces[index] if len(visible) == 1 else torch.cat([pieces[i] for i in visible], dim=2)


def _attend(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, settings: ScoreSettings) -> Tensor:
    if settings.softcap is None and settings.sinks is None:
        return F.scaled_dot_product_attention(query, key, value, attn_mask=bias, scale=settings.scaling)
    cap = settings.softcap
    scores = query @ key.transpose(2, 3) * (settings.scaling / (cap or 1.0))
    scores = (scores if cap is None else torch.tanh(scores) * cap) + bias
    if settings.sinks is not None:
        sinks = settings.sinks.to(scores.dtype).view(1, -1, 1, 1).expand(-1, -1, scores.shape[2], 1)
        scores = torch.cat([scores, sinks], dim=-1)
    shares = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    return shares[..., : key.shape[2]] @ value


def _additive_masks(layout: TreeLayout, mask: ModelMask | None, dtype: torch.dtype) -> list[Tensor]:
    """For each piece [n, keys], 0 where attention is allowed and -inf elsewhere. Made once in a pass.

    Buys time: made for every layer, a train phase takes 2 % longer.
    """
    mask = layout.needed(mask)
    if (mask, dtype) not in layout.masks:
        layout.masks[mask, dtype] = _make_masks(layout, mask, dtype)
    masks: list[Tensor] = layout.masks[mask, dtype]
    return masks


def _make_masks(layout: TreeLayout, mask: ModelMask | None, dtype: torch.dtype) -> list[Tensor]:
    """Chains with equally many ancestors share one mask: each takes its first rows and columns."""
    sizes, starts = layout.sizes, [0, *itertools.accumulate(layout.sizes)]
    above = [sum(sizes[i] for i in piece.ancestors) for piece in layout.pieces]
    longest: dict[int, int] = {}
    for piece, num_above in zip(layout.pieces, above, strict=True):
        if piece.is_chain:
            longest[num_above] = max(longest.get(num_above, 0), piece.size)
    shared = {
        num_above: _chain_mask(size, num_above, mask, dtype, layout.depths.device)
        for num_above, size in longest.items()
    }
    return [
        shared[num_above][: piece.size, : num_above + piece.size]
        if piece.is_chain
        else _subtree_mask(layout, slice(start, start + piece.size), num_above, mask, dtype)
        for piece, start, num_above in zip(layout.pieces, starts, above, strict=False)
    ]


def _chain_mask(
    size: int, num_above: int, mask: ModelMask | None, dtype: torch.dtype, device: torch.device
) -> Tensor:
    """[size, num_above + size] for a chain below a chain of `num_above` nodes."""
    bias = _no_mask(size, num_above + size, dtype, device)
    rows = torch.arange(num_above, num_above + size, device=device)[:, None]
    columns = torch.arange(num_above + size, device=device)
    hidden = columns > rows if mask is None else (columns > rows) | ~mask(rows, columns)
    return bias.masked_fill_(hidden, float("-inf"))


def _subtree_mask(
    layout: TreeLayout, nodes: slice, num_above: int, mask: ModelMask | None, dtype: torch.dtype
) -> Tensor:
    """[n, num_above + n] for any n consecutive nodes below a chain of `num_above` nodes."""
    device, depths, size = layout.depths.device, layout.depths[nodes], nodes.stop - nodes.start
    bias = _no_mask(size, num_above + size, dtype, device)
    columns = torch.arange(nodes.start, nodes.stop, device=device)
    rows = columns[:, None]
    bias[:, num_above:].masked_fill_((columns > rows) | (rows >= layout.ends[nodes]), float("-inf"))
    if mask is not None:
        column_depths = torch.cat([torch.arange(num_above, device=device), depths])
        bias.masked_fill_(~mask(depths[:, None], column_depths), float("-inf"))
    return bias


def _no_mask(rows: int, columns: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros [rows, columns]. Each row takes a multiple of ROW_ELEMENTS in memory."""
    padded = -(-columns // ROW_ELEMENTS) * ROW_ELEMENTS
    return torch.zeros(rows, padded, dtype=dtype, device=device)[:, :columns]
