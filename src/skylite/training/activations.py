"""What a forward pass keeps for its backward: everything, the dear products alone, or the layers' inputs alone."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, create_selective_checkpoint_contexts

import skylite.training.lora_linear  # noqa: F401  # registers the operation named below

Checkpointing = Literal["none", "selective", "full"]

ATTENTION = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
}
LORA_LINEAR = torch.ops.skylite.lora_linear.default
PRODUCTS = {torch.ops.aten.mm.default: 0, torch.ops.aten.addmm.default: 1}
"""Matrix products, and which argument their left side is."""


def keep_less(layers: list[nn.Module], mode: Checkpointing, rank: int, has_dropout: bool) -> None:
    """Have each layer recompute in backward what `mode` does not keep.

    selective: the outputs of attention and of products with the base's weights are kept, as far as anything; norms, activations,
    rotations, copies and LoRA's thin products (inner size `rank`) are cheap and made again.
    """
    if mode == "none":
        return
    context_fn = partial(create_selective_checkpoint_contexts, partial(_selective, rank)) if mode == "selective" else None
    extra: dict[str, Any] = {} if context_fn is None else {"context_fn": context_fn}
    for layer in layers:
        layer.forward = _recomputing(layer.forward, preserve_rng_state=has_dropout, **extra)


def _recomputing(forward: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    def call(*args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        return checkpoint(partial(forward, **kwargs), *args, use_reentrant=False, **options)

    return call


def _selective(rank: int, context: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    if op in ATTENTION or op is LORA_LINEAR or (op in PRODUCTS and args[PRODUCTS[op]].shape[1] > rank):
        return CheckpointPolicy.MUST_SAVE
    return CheckpointPolicy.PREFER_RECOMPUTE
