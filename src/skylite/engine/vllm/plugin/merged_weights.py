"""Merged weights W + scale B A for batches with one adapter: sampling is then as fast as with the base model.

An on-policy step samples from one version, so nearly all its batches have one adapter; mixed ones use
dense_lora. float32 only: a bfloat16 sum would round away most of an adapter. vLLM's layers drop their weights
after packing them for oneDNN, so this module keeps a plain copy of them. Only vLLM's processes import it.

Buys time: without it sampling is 13 % slower.
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

from skylite.engine.vllm.plugin.lora_math import merge_slices

MIN_PASSES = 32
"""Minimum forward passes before a merged copy is replaced, because merging costs several passes."""
_KEPT = "skylite_weight"
_MERGED = "skylite_merged"

Product = Callable[[torch.Tensor, torch.Tensor | None], torch.Tensor]


@dataclass(slots=True)
class Merged:
    """Matrix product of a layer with one adapter merged into its weights."""

    slot: int | None
    """Slot of the merged adapter; None after the slot has changed."""
    product: Product
    """(x [T, I], bias [O] or None) -> [T, O]."""
    passes: int = 0
    """Forward passes since the merge."""


def install() -> None:
    """Make vLLM's layers keep their weights, and its LoRA layers use merged ones. Safe to call again."""
    if getattr(BaseLinearLayerWithLoRA, _MERGED, False):
        return
    setattr(BaseLinearLayerWithLoRA, _MERGED, True)
    pack, apply, reset = (
        vllm_layers.dispatch_cpu_unquantized_gemm,
        BaseLinearLayerWithLoRA._apply_sync,
        BaseLinearLayerWithLoRA.reset_lora,
    )

    def keep_and_pack(layer: Any, remove_weight: bool) -> None:
        # Embedding and LM head have remove_weight=False; they are never merged.
        if remove_weight and layer.weight.dtype == torch.float32 and layer.weight.ndim == 2:
            setattr(layer, _KEPT, lossless_bf16(layer.weight.detach()))
        pack(layer, remove_weight)

    def apply_merged(layer: Any, x: torch.Tensor, bias: torch.Tensor | None = None) -> Any:
        product = merged_product(layer, x.shape[:-1].numel())
        return apply(layer, x, bias) if product is None else product(x, bias)

    def reset_and_forget(layer: Any, index: int) -> None:
        # vLLM always calls this before it writes new matrices to a slot.
        merged: Merged | None = layer.__dict__.get(_MERGED)
        if merged is not None and merged.slot == index:
            merged.slot = None
        reset(layer, index)

    vllm_layers.dispatch_cpu_unquantized_gemm = keep_and_pack
    BaseLinearLayerWithLoRA._apply_sync = apply_merged
    BaseLinearLayerWithLoRA.reset_lora = reset_and_forget


def merged_product(layer: Any, num_rows: int) -> Product | None:
    """The layer's product if all rows of the batch use one adapter; None if dense_lora must handle it."""
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
    """Copy a weight as bfloat16 if that is lossless (as in most published models), else in its dtype.

    Buys memory: copies in float32 take 9 % more of vLLM's memory.
    """
    half = weight.to(torch.bfloat16)
    return half if torch.equal(half.to(weight.dtype), weight) else weight.clone()


def packed_product(weight: torch.Tensor) -> Product:
    """The product with `weight` [O, I] by the kernel that vLLM uses for the base model, for equal speed.

    Buys time: with torch's own product, sampling gives 32 % fewer tokens per second.
    """
    if not ops._supports_onednn:
        return lambda x, bias: functional.linear(x, weight, bias)
    handler = ops.create_onednn_mm(weight.t(), 32)
    return lambda x, bias: ops.onednn_mm(handler, x, bias)
