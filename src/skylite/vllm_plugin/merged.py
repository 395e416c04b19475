"""W + scale B A in place of W and B A, for batches of one adapter: LoRA sampling then costs what the base model's does.

An on-policy step samples from one version alone, so nearly all of its batches are of this kind; mixed ones take dense_lora's way.
float32 only: a bfloat16 sum would round most of an adapter away. vLLM's layers give up their weights once they are packed for
oneDNN, so a plain copy of each is kept to make the sums from. Imported by vLLM's processes alone.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional
from vllm import _custom_ops as ops
from vllm.lora.layers.base_linear import BaseLinearLayerWithLoRA
from vllm.model_executor.layers import utils as vllm_layers

from skylite.vllm_plugin.lora_math import merge_slices

MIN_PASSES = 32
"""Forward passes that a merged copy is kept for, even when another adapter has a batch for itself: making one costs several passes."""
_KEPT = "skylite_weight"
_MERGED = "skylite_merged"

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(slots=True)
class Merged:
    """A layer's product with one adapter merged in."""

    slot: int | None
    """The adapter's slot; None once that slot holds another adapter."""
    product: Product
    """(x [T, I], bias [O] or None) -> [T, O]."""
    passes: int = 0
    """Forward passes since it was made."""


def install() -> None:
    """Have vLLM's layers keep a copy of their weights, and its LoRA layers use merged ones. May be called any number of times."""
    if getattr(BaseLinearLayerWithLoRA, _MERGED, False):
        return
    setattr(BaseLinearLayerWithLoRA, _MERGED, True)
    pack, apply, reset = (
        vllm_layers.dispatch_cpu_unquantized_gemm,
        BaseLinearLayerWithLoRA._apply_sync,
        BaseLinearLayerWithLoRA.reset_lora,
    )

    def keep_and_pack(layer: Any, remove_weight: bool) -> None:
        # Embedding and head come with remove_weight=False; they are never merged.
        if remove_weight and layer.weight.dtype == torch.float32 and layer.weight.ndim == 2:
            setattr(layer, _KEPT, lossless_bf16(layer.weight.detach()))
        pack(layer, remove_weight)

    def apply_merged(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        product = merged_product(layer, x.shape[:-1].numel())
        return apply(layer, x, bias) if product is None else product(x, bias)

    def reset_and_forget(layer: Any, index: int) -> None:
        # vLLM changes a slot's matrices by this and a write after it, and in no other way.
        merged: Merged | None = layer.__dict__.get(_MERGED)
        if merged is not None and merged.slot == index:
            merged.slot = None
        reset(layer, index)

    vllm_layers.dispatch_cpu_unquantized_gemm = keep_and_pack
    BaseLinearLayerWithLoRA._apply_sync = apply_merged
    BaseLinearLayerWithLoRA.reset_lora = reset_and_forget


def merged_product(layer: Any, num_rows: int) -> Product | None:
    """The layer's product for a batch whose rows all use one adapter; None where the batch or the layer has to go the other way."""
    merged: Merged | None = layer.__dict__.get(_MERGED)
    if merged is not None:
        merged.passes += 1
    slot = layer.punica_wrapper.single_slot(num_rows)
    kept: torch.Tensor | None = getattr(layer.base_layer, _KEPT, None)
    if slot is None or kept is None or layer.tp_size > 1:
        return None
    if merged is None or merged.slot != slot:
        if merged is not None and merged.slot is not None and merged.passes < MIN_PASSES:
            return None
        merged = layer.__dict__[_MERGED] = Merged(
            slot, packed_product(merge_slices(kept, layer.lora_a_stacked, layer.lora_b_stacked, slot))
        )
    return merged.product


def lossless_bf16(weight: torch.Tensor) -> torch.Tensor:
    """A copy in bfloat16 where that loses nothing (nearly all models are published in it), else in its own type."""
    half = weight.to(torch.bfloat16)
    return half if torch.equal(half.to(weight.dtype), weight) else weight.clone()


def packed_product(weight: torch.Tensor) -> Product:
    """The product with `weight` [O, I] by the kernel that vLLM uses for the base, so that both are equally fast."""
    if not ops._supports_onednn:
        return lambda x, bias: functional.linear(x, weight, bias)
    handler = ops.create_onednn_mm(weight.t(), 32)
    return lambda x, bias: ops.onednn_mm(handler, x, bias)
