"""Many parameters as one tensor: one thing to broadcast, to sum over ranks, to fetch from a device, to write into a file."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def views_of(flat: Tensor, params: Sequence[nn.Parameter]) -> list[Tensor]:
    """Parts of `flat` [P], one after the other, in the shapes of the parameters."""
    parts = torch.split(flat, [param.numel() for param in params])
    return [part.view_as(param) for part, param in zip(parts, params, strict=True)]


def laid_out(params: Sequence[nn.Parameter]) -> Tensor:
    """Make the parameters views of one tensor [P], which holds them one after the other; returns it."""
    flat = torch.cat([param.data.flatten() for param in params])
    for param, view in zip(params, views_of(flat, params), strict=True):
        param.data = view
    return flat
