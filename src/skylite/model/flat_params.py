"""Flat storage: many parameters as views of one tensor, so that a sync, an all-reduce or a write is one
operation."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def split_like(flat: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Consecutive views of `flat` [P] in the shapes of the parameters."""
    parts = torch.split(flat, [param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def flatten_params(params: Sequence[nn.Parameter]) -> Tensor:
    """Move the parameters into one tensor [P], in order, and make them views of it. Returns that tensor."""
    flat = torch.cat([param.data.flatten() for param in params])
    for param, view in zip(params, split_like(flat, params), strict=True):
        param.data = view
    return flat
