"""Linear layers and their LoRA adapters as one operation that keeps what its gradients need and nothing else.

PEFT's own layer makes x A^T, its product with B, that times the scale and the sum with the base's output one after the other: four
passes over [T, O] numbers, of which the base's product needs one. Here LoRA's product is added in the multiplication itself, x is
kept once or made again, and nothing is kept or computed for a gradient of the frozen weight. Layers that read the same x (q, k and v;
gate and up) are one product with their weights below each other: thin matrices multiply at a fraction of a machine's speed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.nn import functional

from skylite.training.recompute import Recipe, recipe_of

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same x, by the names that transformers gives them."""


def lora_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, bs: list[Tensor], scales: list[float], recipe: Recipe | None = None
) -> Tensor:
    """y = x W^T + bias + scale (x A^T) B^T, for each of S layers side by side.

    Args:
        x: [T, I]
        weight: [O, I], frozen: the layers' weights below each other.
        bias: [O] or None, frozen.
        a: [S R, I], of x's type: the layers' A below each other.
        bs: S matrices [O_s, R], of x's type.
        scales: S numbers.
        recipe: makes x again in backward; without it x is kept.

    Returns:
        [T, O]
    """
    y: Tensor = _LoraLinear.apply(x, weight, bias, a, scales, recipe, *bs)  # type: ignore[no-untyped-call]
    return y


class _LoraLinear(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, a: Tensor, scales: list[float], recipe: Recipe | None, *bs: Tensor
    ) -> Tensor:
        shrunk = x @ a.t()
        y = functional.linear(x, weight, bias)
        for (columns, ranks), b, scale in zip(_places(bs), bs, scales, strict=True):
            y[:, columns].addmm_(shrunk[:, ranks], b.t(), alpha=scale)
        ctx.save_for_backward(x if recipe is None else None, shrunk, weight, a, *bs)
        ctx.scales, ctx.recipe, ctx.like = scales, recipe, (x.shape, x.dtype)
        return y

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, shrunk, weight, a, *bs = ctx.saved_tensors
        shape, kind = ctx.like
        x = ctx.recipe().reshape(shape).to(kind) if x is None else x
        ctx.recipe = None
        back, of_bs = torch.empty_like(shrunk), []
        for (columns, ranks), b, scale in zip(_places(bs), bs, ctx.scales, strict=True):
            torch.mm(grad[:, columns], b, out=back[:, ranks])
            back[:, ranks].mul_(scale)
            of_bs.append((grad[:, columns].t() @ shrunk[:, ranks]).mul_(scale))
        of_x = (grad @ weight).addmm_(back, a) if ctx.needs_input_grad[0] else None
        return of_x, None, None, back.t() @ x, None, None, *of_bs


def _places(bs: tuple[Tensor, ...] | list[Tensor]) -> Iterator[tuple[slice, slice]]:
    """Columns of y and of x A^T that belong to each layer."""
    column = rank = 0
    for b in bs:
        yield slice(column, column + b.shape[0]), slice(rank, rank + b.shape[1])
        column, rank = column + b.shape[0], rank + b.shape[1]


def fuse(model: nn.Module) -> None:
    """Have every LoRA linear layer of a PEFT model use `lora_linear` wherever it computes exactly this."""
    alone = {id(m): m for m in model.modules() if type(m) is PeftLinear}
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(id(x) in alone for x in layers) and _can_stand_together([x.base_layer for x in layers if x is not None]):
                _Layers([alone.pop(id(x)) for x in layers])
    for layer in alone.values():
        _Layers([layer])


def _can_stand_together(layers: list[Any]) -> bool:
    """Shards of several ranks cannot: each is gathered by itself."""
    same = {(x.in_features, x.weight.dtype, x.weight.device, x.bias is None) for x in layers}
    return len(same) == 1 and not any(isinstance(x.weight, DTensor) for x in layers)


class _Layers:
    """PEFT linear layers that read the same x, and what they answer to it."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._plain: list[Callable[..., Tensor]] = [layer.forward for layer in layers]
        self._stacked = {name: _below_each_other([getattr(x.base_layer, name) for x in layers]) for name in ("weight", "bias")}
        self._x: Tensor | None = None
        self._answers: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            layer.forward = self._forward_of(index)

    def _forward_of(self, index: int) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            names = {_only_adapter(layer) for layer in self._layers}
            name, kind = names.pop(), _compute_type(x)
            if names or name is None or args or kwargs or self._layers[0].base_layer.weight.dtype != kind:
                return self._plain[index](x, *args, **kwargs)
            if self._x is not x or index not in self._answers:
                self._x, self._answers = x, dict(enumerate(self._compute(x, name, kind)))
            answer: Tensor = self._answers.pop(index)
            if not self._answers:
                self._x = None
            return answer

        return forward

    def _compute(self, x: Tensor, name: str, kind: torch.dtype) -> tuple[Tensor, ...]:
        flat = x.reshape(-1, x.shape[-1]).to(kind)
        # A lone layer is asked for its weight each time: FSDP changes it.
        base = self._layers[0].base_layer
        weight, bias = (base.weight, base.bias) if len(self._layers) == 1 else (self._stacked["weight"], self._stacked["bias"])
        parts = [layer.lora_A[name].weight.to(kind) for layer in self._layers]
        bs = [layer.lora_B[name].weight.to(kind) for layer in self._layers]
        scales = [layer.scaling[name] for layer in self._layers]
        y = lora_linear(flat, weight, bias, parts[0] if len(parts) == 1 else torch.cat(parts), bs, scales, recipe_of(x))
        y = y.view(*x.shape[:-1], -1)
        return (y,) if len(bs) == 1 else torch.split(y, [len(b) for b in bs], dim=-1)


def _below_each_other(parts: list[Any]) -> Any:
    """One tensor whose rows the given parameters now are, so that nothing is held twice; None for None and for a lone one."""
    if len(parts) == 1 or parts[0] is None:
        return None
    whole = torch.cat([x.data for x in parts])
    for part, rows in zip(parts, torch.split(whole, [len(x) for x in parts]), strict=True):
        part.data = rows
    return whole


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
