"""What a forward pass keeps for its backward: everything, all but what is cheap to make again, or the layers' inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "selective", "full"]
"""selective: the outputs of norms and of act(gate) * up are made again (`model/fused_ops.py`); full: whole layers are."""


def replay_layers(layers: list[nn.Module], has_dropout: bool) -> None:
    """Have each layer keep its input alone and run once more in backward."""
    for layer in layers:
        layer.forward = _replayed(layer.forward, has_dropout)


def _replayed(forward: Callable[..., Any], has_dropout: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=has_dropout
        )

    return call
