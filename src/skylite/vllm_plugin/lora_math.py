"""LoRA for a batch whose rows use different adapters: y += (x A^T) B^T, one pair of matrix products an adapter."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn import functional

BASE = -1
"""Slot number of a row that uses no adapter."""


@dataclass(frozen=True, slots=True)
class RowGroup:
    """The rows of a batch that use one adapter slot."""

    slot: int
    rows: slice | torch.Tensor
    """A slice where the rows are consecutive (a view, no copy), else [N] int64."""


def group_rows(slots: Sequence[int]) -> tuple[RowGroup, ...]:
    """One group for every adapter slot in `slots` ([T], BASE for none), in order of slot; rows of BASE are in no group."""
    members: dict[int, list[int]] = {}
    for row, slot in enumerate(slots):
        if slot != BASE:
            members.setdefault(slot, []).append(row)
    return tuple(RowGroup(slot, _compact(rows)) for slot, rows in sorted(members.items()))


def add_lora(
    y: torch.Tensor,
    x: torch.Tensor,
    a: torch.Tensor,
    b: torch.Tensor,
    groups: Sequence[RowGroup],
    scale: float = 1.0,
) -> None:
    """y[rows] += scale * (x[rows] A[slot]^T) B[slot]^T for every group, in place; other rows are not touched.

    Args:
        y: [T, O], may be a view of some columns.
        x: [T, I]
        a: [S, 1, R, I], adapters' A matrices by slot.
        b: [S, 1, O, R]
    """
    for group in groups:
        add_expanded(y, functional.linear(x[group.rows], a[group.slot, 0]), b, group, scale)


def join_slices(parts: Sequence[torch.Tensor]) -> torch.Tensor:
    """The A matrices of a fused layer's slices (q, k, v or gate, up) as one [S, n R, I], so that one product shrinks for all.

    Args:
        parts: n tensors [S, 1, R, I]. The first call moves them into common storage: they stay the same tensors, vLLM goes on
            writing adapters into them, and what is returned sees it.
    """
    slots, _, rank, width = parts[0].shape
    storage = parts[0].untyped_storage()
    if any(p.untyped_storage().data_ptr() != storage.data_ptr() for p in parts):
        joined = torch.cat(list(parts), dim=1)
        for index, part in enumerate(parts):
            view = joined[:, index : index + 1]
            part.set_(view.untyped_storage(), view.storage_offset(), view.size(), view.stride())
    n = len(parts)
    return parts[0].as_strided((slots, n * rank, width), (n * rank * width, width, 1), 0)


def merge_slices(
    weight: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor], slot: int
) -> torch.Tensor:
    """W + B[slot] A[slot] in float32, slice below slice (q, k, v or gate, up in one layer).

    Args:
        weight: [O, I], left as it is.
        a: n tensors [S, 1, R, I], adapters' A matrices by slot.
        b: n tensors [S, 1, O_i, R] whose O_i add up to O, the adapter's scale already in them.
    """
    merged = weight.to(torch.float32, copy=True)
    start = 0
    for part_a, part_b in zip(a, b, strict=True):
        width = part_b.shape[2]
        merged[start : start + width].addmm_(part_b[slot, 0].float(), part_a[slot, 0].float())
        start += width
    return merged


def add_expanded(
    y: torch.Tensor, shrunk: torch.Tensor, b: torch.Tensor, group: RowGroup, scale: float = 1.0
) -> None:
    """y[rows] += scale * shrunk B[slot]^T in place.

    Args:
        y: [T, O'], where O' differs from O when layer or adapter pads its output; the padding is left alone. Its type, which may be
            wider than the adapter's (float32 logits of a bfloat16 model), is computed in.
        shrunk: [N, R], the group's rows of x A^T.
        b: [S, 1, O, R]
    """
    width = min(y.shape[1], b.shape[2])
    matrix = b[group.slot, 0, :width].to(y.dtype).t()
    if isinstance(group.rows, slice):
        y[group.rows, :width].addmm_(shrunk.to(y.dtype), matrix, alpha=scale)
    else:
        y[:, :width].index_add_(0, group.rows, shrunk.to(y.dtype) @ matrix, alpha=scale)


def _compact(rows: list[int]) -> slice | torch.Tensor:
    if rows[-1] - rows[0] + 1 == len(rows):
        return slice(rows[0], rows[-1] + 1)
    return torch.tensor(rows)
