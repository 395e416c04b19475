"""Norms and gated MLPs that keep their inputs alone, and let the LoRA layers after them make their outputs again.

A LoRA layer wants its input for the gradient of A. Where that is the output of a norm or of act(gate) * up, a pass or two over it
makes it again in backward (benchmarks/README.md, `train_phase.py`, has what that costs and spares).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from skylite.model.recompute import with_recompute_fn

Gain = Callable[[Tensor], Tensor]
GAINS: dict[str, Gain] = {"weight": lambda w: w, "1 + weight": lambda w: 1 + w}
"""What an RMS norm multiplies by: Llama and most others, Gemma."""


def rms_norm(x: Tensor, gain: Tensor, eps: float, again: bool) -> Tensor:
    """y = gain * x / sqrt(mean(x^2) + eps) over the last dimension (arXiv 1910.07467, eq. 4), of x's type and computed in float32 or wider.

    No gradient for the gain: it is frozen. `again`: y carries its recipe.
    """
    y: Tensor = _RmsNorm.apply(x, gain, eps)  # type: ignore[no-untyped-call]
    if not (again and torch.is_grad_enabled()):
        return y
    kept = x.detach()
    return with_recompute_fn(y, lambda: _normed(kept, gain, eps)[0])


def gated(gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor], again: bool) -> Tensor:
    """y = act(gate) * up. `again`: y carries its recipe."""
    y: Tensor = _Gated.apply(gate, up, act)  # type: ignore[no-untyped-call]
    if not (again and torch.is_grad_enabled()):
        return y
    kept = gate.detach(), up.detach()
    return with_recompute_fn(y, lambda: act(kept[0]) * kept[1])


def fuse_norms(model: nn.Module, gain: Gain, again: bool) -> Callable[[], None] | None:
    """Have every RMS norm of the model use `rms_norm`; returns what undoes it, None where the model has no such norm."""
    norms = [m for m in model.modules() if type(m).__name__.endswith("RMSNorm")]

    def forward_of(norm: Any, eps: float) -> Callable[[Tensor], Tensor]:
        return lambda x: rms_norm(x, gain(norm.weight), eps, again)

    return _replace_forwards(
        {norm: forward_of(norm, eps) for norm in norms if (eps := _eps(norm)) is not None}
    )


def fuse_mlps(model: nn.Module, again: bool) -> Callable[[], None] | None:
    """Have every gated MLP of the model use `gated`; returns what undoes it, None where the model has no such MLP."""
    parts = ("gate_proj", "up_proj", "down_proj", "act_fn")
    mlps = [m for m in model.modules() if all(hasattr(m, part) for part in parts)]

    def forward_of(mlp: Any) -> Callable[[Tensor], Tensor]:
        return lambda x: mlp.down_proj(gated(mlp.gate_proj(x), mlp.up_proj(x), mlp.act_fn, again))

    return _replace_forwards({mlp: forward_of(mlp) for mlp in mlps})


class _RmsNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, gain: Tensor, eps: float) -> Tensor:
        y, scale = _normed(x, gain, eps)
        ctx.save_for_backward(x, gain, scale)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        x, gain, scale = ctx.saved_tensors
        x_wide, grad = x.to(scale.dtype), grad.to(scale.dtype) * gain.to(scale.dtype)
        # d/dx (x s) . g = s g - x s^3 mean(x . g), with s = 1 / sqrt(mean(x^2) + eps)
        shared = torch.linalg.vecdot(x_wide, grad).unsqueeze(-1).mul_(scale.pow(3)).div_(-x.shape[-1])
        return torch.addcmul(grad.mul_(scale), x_wide, shared).to(x.dtype), None, None


class _Gated(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor, act: Callable[[Tensor], Tensor]) -> Tensor:
        ctx.save_for_backward(gate, up)
        ctx.act = act
        return act(gate) * up

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None]:
        gate, up = ctx.saved_tensors
        with torch.enable_grad():
            leaf = gate.detach().requires_grad_()
            active = ctx.act(leaf)
        (of_gate,) = torch.autograd.grad(active, leaf, grad * up)
        return of_gate, grad * active.detach(), None


def _normed(x: Tensor, gain: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    x_wide = x.to(torch.promote_types(x.dtype, torch.float32))
    scale = torch.linalg.vecdot(x_wide, x_wide).unsqueeze(-1).div_(x.shape[-1]).add_(eps).rsqrt_()
    return (x_wide * scale).mul_(gain.to(x_wide.dtype)).to(x.dtype), scale


def _eps(norm: Any) -> float | None:
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return (
        float(found)
        if isinstance(found, float) and isinstance(getattr(norm, "weight", None), Tensor)
        else None
    )


def _replace_forwards(forwards: dict[nn.Module, Callable[[Tensor], Tensor]]) -> Callable[[], None] | None:
    if not forwards:
        return None
    for module, forward in forwards.items():
        module.forward = forward

    def undo() -> None:
        for module in forwards:
            del module.forward

    return undo
