"""Activation checkpointing: which activations the forward pass keeps and which backward recomputes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Checkpointing = Literal["none", "selective", "full"]
"""none: keep everything. selective: recompute the outputs of norms and of act(gate) * up
(model/fused_ops.py). full: keep only the inputs of the layers and recompute the rest."""


def checkpoint_layers(layers: list[nn.Module], has_dropout: bool) -> None:
    """Make each layer keep only its input and run its forward pass again in backward."""
    for layer in layers:
        layer.forward = _checkpointed(layer.forward, has_dropout)


def _checkpointed(forward: Callable[..., Any], has_dropout: bool) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(
            partial(forward, **kwargs), *args, use_reentrant=False, preserve_rng_state=has_dropout
        )

    return call
