"""Fake CUDA tensors: they have a shape, a dtype and a device, and no values. Waiting for one raises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._higher_order_ops.flex_attention import flex_attention as flex_operation
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from skylite.model import flex_attention

GPU = torch.device("cuda", 0)
_PINNED = "_is_pinned_in_a_test"


class HostSync(AssertionError):
    """An operation waits for the GPU."""


class NoCopies(TorchDispatchMode):
    """Inside, a copy from the GPU raises HostSync, and so does a copy to it from memory that is not pinned.

    A tensor without dimensions may go to the GPU: its value is an argument of a kernel.
    """

    supports_higher_order_operators = True

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        before = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        after = [x for x in tree_leaves(out) if isinstance(x, Tensor)]
        from_gpu = any(x.device.type == "cuda" for x in before)
        to_gpu = any(x.device.type == "cuda" for x in after)
        if from_gpu and not to_gpu and after:
            raise HostSync(f"{func} copies from the GPU")
        unpinned = [
            x for x in before if x.device.type == "cpu" and x.dim() and not getattr(x, _PINNED, False)
        ]
        if to_gpu and unpinned:
            raise HostSync(f"{func} copies to the GPU from memory that is not pinned")
        return out


@contextmanager
def fake_gpu() -> Iterator[FakeTensorMode]:
    """Inside, tensors are fake and the GPU's branches run. Replaced, because they need a GPU:

    - attention: memory-efficient attention, which a GPU uses with a mask, instead of the choice of a backend
    - FlexAttention: its operation without the compiler
    - pinned memory: a mark
    - Module.to: new parameters
    - autocast: torch refuses it without a GPU
    """

    def pin_memory(x: Tensor) -> Tensor:
        setattr(x, _PINNED, True)
        return x

    with pytest.MonkeyPatch.context() as patch, FakeTensorMode(allow_non_fake_inputs=False) as mode:
        patch.setattr(torch.cuda.amp.common, "amp_definitely_not_available", lambda: False)
        patch.setattr(torch.cuda, "is_bf16_supported", lambda: True)
        patch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
        patch.setattr(nn.Module, "_apply", apply)
        patch.setattr(Tensor, "pin_memory", pin_memory)
        patch.setattr(torch.nn.functional, "scaled_dot_product_attention", efficient_attention)
        patch.setattr(flex_attention, "_compiled", lambda: uncompiled_flex)
        yield mode


def apply(module: nn.Module, change: Callable[[Tensor], Tensor], recurse: bool = True) -> nn.Module:
    """Module._apply with new parameters. torch's own exchanges contents, which fake tensors do not allow."""
    for child in module.children():
        apply(child, change)
    for name, param in module._parameters.items():
        if param is not None and (changed := change(param.detach())).device != param.device:
            module._parameters[name] = nn.Parameter(changed, param.requires_grad)
    for name, buffer in module._buffers.items():
        module._buffers[name] = None if buffer is None else change(buffer)
    return module


def efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """scaled_dot_product_attention as a GPU computes it, with torch's memory-efficient kernel."""
    if torch.is_autocast_enabled("cuda"):
        dtype = torch.get_autocast_dtype("cuda")
        query, key, value = (x.to(dtype) for x in (query, key, value))
        attn_mask = None if attn_mask is None else attn_mask.to(dtype)
    if enable_gqa:
        repeats = query.shape[1] // key.shape[1]
        key, value = (x.repeat_interleave(repeats, dim=1) for x in (key, value))
    if attn_mask is not None:
        if attn_mask.dtype == torch.bool:
            attn_mask = torch.zeros_like(attn_mask, dtype=query.dtype).masked_fill_(~attn_mask, float("-inf"))
        attn_mask = attn_mask.expand(query.shape[0], query.shape[1], query.shape[2], key.shape[2])
    with torch.autocast("cuda", enabled=False):
        out: Tensor = torch.ops.aten._scaled_dot_product_efficient_attention(
            query, key, value, attn_mask, torch.is_grad_enabled(), dropout_p, is_causal, scale=scale
        )[0]
    return out


def uncompiled_flex(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Any,
    block_mask: Any,
    scale: float,
    kernel_options: dict[str, Any],
    return_aux: None,
) -> Tensor:
    """FlexAttention without sinks. Computes scores and mask for one query and key, to see their devices."""
    index = torch.zeros(1, dtype=torch.int64, device=query.device)
    assert block_mask.mask_mod(index, index, index, index).device == query.device
    modify = score_mod or (lambda score, *_: score)
    assert query.shape[:2] == key.shape[:2]
    out: Tensor = flex_operation(
        query, key, value, modify, block_mask.as_tuple(), scale, kernel_options | {"OUTPUT_LOGSUMEXP": True}
    )[0]
    return out
