"""vLLM's own C kernels for RMS norms, which it has for CPUs and does not call there. Imported by vLLM's processes alone.

Without a compiler, which vLLM turns off where there are adapters, a norm is otherwise half a dozen operations of torch, two norms a
layer, of which each costs more to start than to compute for the few rows of a decode.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.layernorm import RMSNorm


def install() -> None:
    """Have vLLM's RMS norms on a CPU use the kernels, where `+rms_norm` is among its custom_ops. May be called any number of times."""
    RMSNorm.forward_cpu = rms_norm


def rms_norm(norm: RMSNorm, x: torch.Tensor, residual: torch.Tensor | None = None) -> Any:
    """The norm of x [..., H] or, with a residual, a pair: that of x + residual, and this sum; both arguments are overwritten then.

    The kernels read whole rows one after the other, all numbers of one type; anything else goes vLLM's way.
    """
    weight, eps = norm.weight.data, norm.variance_epsilon
    plain = (
        norm.pass_weight
        and norm.pass_weight_add
        and norm.variance_size_override is None
        and weight.dtype == x.dtype
    )
    if not plain or not x.is_contiguous():
        return norm.forward_native(x, residual)
    if residual is None:
        out = torch.empty_like(x)
        torch.ops._C.rms_norm(out, x, weight, eps)
        return out
    if residual.dtype != x.dtype or not residual.is_contiguous():
        return norm.forward_native(x, residual)
    torch.ops._C.fused_add_rms_norm(x, residual, weight, eps)
    return x, residual
