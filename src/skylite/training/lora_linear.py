"""A linear layer and its LoRA adapter as one operation that keeps what its gradients need and nothing else.

PEFT's own layer makes x A^T, its product with B, that times the scale and the sum with the base's output one after the other: four
passes over [T, O] numbers, of which the base's product needs one. Here LoRA's product is added in the multiplication itself, x is
kept once, and nothing is kept or computed for a gradient of the frozen weight.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn import functional


@torch.library.custom_op("skylite::lora_linear", mutates_args=())
def lora_linear(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """y = x W^T + bias + scale (x A^T) B^T, and x A^T for backward.

    Args:
        x: [T, I]
        weight: [O, I], frozen.
        bias: [O] or None, frozen.
        a: [R, I], of x's type.
        b: [O, R], of x's type.

    Returns:
        y [T, O] and x A^T [T, R].
    """
    shrunk = x @ a.t()
    return functional.linear(x, weight, bias).addmm_(shrunk, b.t(), alpha=scale), shrunk


@lora_linear.register_fake
def _(x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, b: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], weight.shape[0]), x.new_empty(x.shape[0], a.shape[0])


@torch.library.custom_op("skylite::lora_linear_backward", mutates_args=())
def lora_linear_backward(
    grad: Tensor, x: Tensor, shrunk: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x [T, I] (empty where nobody needs it), A [R, I] and B [O, R] from that of y [T, O]."""
    back = (grad @ b).mul_(scale)
    of_x = (grad @ weight).addmm_(back, a) if needs_x else grad.new_empty(0)
    return of_x, back.t() @ x, (grad.t() @ shrunk).mul_(scale)


@lora_linear_backward.register_fake
def _(
    grad: Tensor, x: Tensor, shrunk: Tensor, weight: Tensor, a: Tensor, b: Tensor, scale: float, needs_x: bool
) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(x) if needs_x else x.new_empty(0), torch.empty_like(a), torch.empty_like(b)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, _, a, b, scale = inputs
    ctx.mark_non_differentiable(output[1])
    ctx.save_for_backward(x, output[1], weight, a, b)
    ctx.scale = scale


def _backward(ctx: Any, grad: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    needs_x = ctx.needs_input_grad[0]
    of_x, of_a, of_b = lora_linear_backward(grad.contiguous(), *ctx.saved_tensors, ctx.scale, needs_x)
    return of_x if needs_x else None, None, None, of_a, of_b, None


torch.library.register_autograd("skylite::lora_linear", _backward, setup_context=_keep)


def fuse(model: nn.Module) -> None:
    """Have every LoRA linear layer of a PEFT model use `lora_linear` wherever it computes exactly this."""
    for module in model.modules():
        if type(module) is PeftLinear:
            module.forward = _fused(module, module.forward)


def _fused(layer: Any, plain: Callable[..., Tensor]) -> Callable[..., Tensor]:
    def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        name = _only_adapter(layer)
        base, kind = layer.base_layer, _compute_type(x)
        if name is None or args or kwargs or base.weight.dtype != kind:
            return plain(x, *args, **kwargs)
        flat = x.reshape(-1, x.shape[-1]).to(kind)
        a, b = layer.lora_A[name].weight.to(kind), layer.lora_B[name].weight.to(kind)
        y: Tensor = lora_linear(flat, base.weight, base.bias, a, b, layer.scaling[name])[0]
        return y.view(*x.shape[:-1], -1)

    return forward


def _compute_type(x: Tensor) -> torch.dtype:
    """What autocast, where it is on, would have matrices multiplied in."""
    return torch.get_autocast_dtype(x.device.type) if torch.is_autocast_enabled(x.device.type) else x.dtype


def _only_adapter(layer: Any) -> str | None:
    """The one adapter that is on; None where there is none, or something else is to be done than adding its product."""
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return None
    dropout = layer.lora_dropout[names[0]]
    drops = layer.training or dropout.training
    if (drops and not isinstance(dropout, nn.Identity)) or layer.lora_variant or layer.lora_bias.get(names[0]):
        return None
    return str(names[0])
