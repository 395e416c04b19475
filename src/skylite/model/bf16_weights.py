"""Frozen weights held as their files hold them, in bfloat16, where the pass computes in float32: half their memory, the very same numbers.

A matrix is widened where it is used, one at a time. That is a pass over it beside a product that goes over it once a token (by hand, on two
cores and 1,130 tokens: about 1 % of the product's time).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional


def compute_type(x: Tensor) -> torch.dtype:
    """What autocast, where it is on, would have matrices multiplied in; else x's own type."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def can_widen(weight: Tensor, kind: torch.dtype) -> bool:
    """Whether `weight` is of type `kind`, or a narrower one whose every value `kind` has."""
    return torch.promote_types(weight.dtype, kind) == kind


def hold_in_bf16(modules: Iterable[nn.Module]) -> Callable[[], None] | None:
    """Hold the frozen float32 matrices of linear layers and embeddings in bfloat16, all whose values fit; returns what undoes it.

    None where there is none: other types, values of float32's own, matrices that learn or that FSDP shards.
    Layers of a class of their own, and what is tied to theirs, are left alone: they may read their weight's type.
    """
    tied: dict[int, list[Any]] = {}
    for module in modules:
        if (weight := module._parameters.get("weight")) is not None:
            tied.setdefault(id(weight), []).append(module)
    changed = [same for same in tied.values() if _to_bf16(same)]

    def undo() -> None:
        for same in changed:
            wide = nn.Parameter(same[0].weight.float(), False)
            for module in same:
                module.weight = wide
                del module.forward

    return undo if changed else None


def _to_bf16(same: Sequence[Any]) -> bool:
    """Whether the one weight of these modules is held in bfloat16 now; tied weights stay one."""
    weight = same[0].weight
    if not all(type(module) in FORWARDS for module in same):
        return False
    if weight.dtype != torch.float32 or weight.requires_grad or isinstance(weight, DTensor):
        return False
    bf16 = nn.Parameter(weight.detach().to(torch.bfloat16), False)
    if not torch.equal(bf16.float(), weight):
        return False
    for module in same:
        module.weight = bf16
        module.forward = _forward_of(module)
    return True


def _forward_of(module: Any) -> Callable[[Tensor], Tensor]:
    forward = FORWARDS[type(module)]
    return lambda x: forward(module, x)


def _linear(module: nn.Linear, x: Tensor) -> Tensor:
    y: Tensor = _Linear.apply(x.to(compute_type(x)), module.weight, module.bias)  # type: ignore[no-untyped-call]
    return y


def _embedding(module: nn.Embedding, ids: Tensor) -> Tensor:
    return functional.embedding(ids, module.weight).float()


FORWARDS: dict[type[nn.Module], Callable[[Any, Tensor], Tensor]] = {
    nn.Linear: _linear,
    nn.Embedding: _embedding,
}


class _Linear(torch.autograd.Function):
    """Autograd would keep the widened matrix until backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        ctx.save_for_backward(weight)
        return functional.linear(x, weight.to(x.dtype), bias)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (weight,) = ctx.saved_tensors
        return grad @ weight.to(grad.dtype), None, None
