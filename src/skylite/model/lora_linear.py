"""Linear layers and their LoRA adapters as one operation that keeps what its gradients need and nothing else.

PEFT's own layer makes x A^T, its product with B, that times the scale and the sum with the base's output one after the other: four
passes over [T, O] numbers, of which the base's product needs one. Here LoRA's product is added in the multiplication itself, x is
kept once or made again, and nothing is kept or computed for a gradient of the frozen weight. Layers that read the same x (q, k and v;
gate and up) are one operation: one thin product with all their A, and gradients of x that are summed in the multiplication.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from peft.tuners.lora import Linear as PeftLinear
from torch import Tensor, nn
from torch.nn import functional

from skylite.model.bf16_weights import can_widen, compute_type
from skylite.model.recompute import RecomputeFn, recompute_fn_of

SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers that read the same x, by the names that transformers gives them."""


def lora_linears(
    x: Tensor,
    weights: Sequence[Tensor],
    biases: Sequence[Tensor | None],
    all_a: Sequence[Tensor],
    bs: Sequence[Tensor],
    scales: Sequence[float],
    recipe: RecomputeFn | None = None,
) -> tuple[Tensor, ...]:
    """y = x W^T + bias + scale (x A^T) B^T for each of S layers.

    Args:
        x: [T, I]
        weights: S matrices [O, I], frozen; O may differ. Of x's type, or a narrower one: each is widened while it is used.
        biases: S vectors [O] or None, frozen.
        all_a: S matrices [R, I], of x's type; R may differ.
        bs: S matrices [O, R], of x's type.
        scales: S numbers.
        recipe: makes x again in backward; without it x is kept.

    Returns:
        S tensors [T, O].
    """
    ys: tuple[Tensor, ...] = _LoraLinears.apply(x, scales, recipe, *weights, *biases, *all_a, *bs)  # type: ignore[no-untyped-call]
    return ys


class _LoraLinears(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, scales: Sequence[float], recipe: RecomputeFn | None, *params: Any
    ) -> tuple[Tensor, ...]:
        weights, biases, all_a, bs = _in_parts(params, len(scales))
        shrunk, ys = x @ _below_each_other(all_a).t(), []
        for weight, bias, b, ranks, scale in zip(weights, biases, bs, _rows(all_a), scales, strict=True):
            ys.append(
                functional.linear(x, weight.to(x.dtype), bias).addmm_(shrunk[:, ranks], b.t(), alpha=scale)
            )
        # The parameters themselves, not the joined copy of all A: that is 11 MB of a SmolLM2-135M with rank 32.
        ctx.save_for_backward(x if recipe is None else None, shrunk, *weights, *all_a, *bs)
        ctx.scales, ctx.recipe, ctx.like = scales, recipe, (x.shape, x.dtype)
        ctx.set_materialize_grads(False)
        return tuple(ys)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        x, shrunk, *params = ctx.saved_tensors
        shape, kind = ctx.like
        x = ctx.recipe().reshape(shape).to(kind) if x is None else x
        ctx.recipe = None
        weights, all_a, bs = _in_parts(params, len(grads))
        back = torch.zeros_like(shrunk)
        of_bs: list[Tensor | None] = []
        of_x = None
        for grad, weight, b, ranks, scale in zip(grads, weights, bs, _rows(all_a), ctx.scales, strict=True):
            if grad is None:  # nobody asked for this layer's output
                of_bs.append(None)
                continue
            torch.mm(grad, b, out=back[:, ranks])
            back[:, ranks].mul_(scale)
            of_bs.append((grad.t() @ shrunk[:, ranks]).mul_(scale))
            if ctx.needs_input_grad[0]:
                wide = weight.to(grad.dtype)
                of_x = grad @ wide if of_x is None else of_x.addmm_(grad, wide)
        of_x = None if of_x is None else of_x.addmm_(back, _below_each_other(all_a))
        of_a = back.t() @ x
        return of_x, None, None, *[None] * (2 * len(grads)), *[of_a[rows] for rows in _rows(all_a)], *of_bs


def _in_parts(params: Sequence[Any], size: int) -> list[Sequence[Any]]:
    """Parts of `size`, one after the other."""
    return [params[start : start + size] for start in range(0, len(params), size)]


def _below_each_other(all_a: Sequence[Tensor]) -> Tensor:
    return all_a[0] if len(all_a) == 1 else torch.cat(tuple(all_a))


def _rows(all_a: Sequence[Tensor]) -> Iterator[slice]:
    """The rows of all A below each other, and columns of x A^T, that belong to each layer."""
    start = 0
    for a in all_a:
        yield slice(start, start + len(a))
        start += len(a)


def fuse(model: nn.Module) -> None:
    """Have every LoRA linear layer of a PEFT model use `lora_linears` wherever it computes exactly this."""
    alone = {id(m): m for m in model.modules() if type(m) is PeftLinear}
    for module in model.modules():
        for names in SIBLINGS:
            layers = [getattr(module, name, None) for name in names]
            if all(id(x) in alone for x in layers):
                _Layers([alone.pop(id(x)) for x in layers])
    for layer in alone.values():
        _Layers([layer])


class _Layers:
    """PEFT linear layers that read the same x, and what they answer to it."""

    def __init__(self, layers: list[Any]) -> None:
        self._layers = layers
        self._plain: list[Callable[..., Tensor]] = [layer.forward for layer in layers]
        self._x: Tensor | None = None
        self._answers: dict[int, Tensor] = {}
        for index, layer in enumerate(layers):
            layer.forward = self._forward_of(index)

    def _forward_of(self, index: int) -> Callable[..., Tensor]:
        def forward(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
            names, kind = {_only_adapter(layer) for layer in self._layers}, compute_type(x)
            name = names.pop()
            of_type = all(can_widen(layer.base_layer.weight, kind) for layer in self._layers)
            if names or name is None or args or kwargs or not of_type:
                return self._plain[index](x, *args, **kwargs)
            if self._x is not x or index not in self._answers:
                self._x, self._answers = x, dict(enumerate(self._compute(x, name, kind)))
            answer: Tensor = self._answers.pop(index)
            if not self._answers:
                self._x = None
            return answer

        return forward

    def _compute(self, x: Tensor, name: str, kind: torch.dtype) -> list[Tensor]:
        flat = x.reshape(-1, x.shape[-1]).to(kind)
        bases = [layer.base_layer for layer in self._layers]
        ys = lora_linears(
            flat,
            [base.weight for base in bases],
            [base.bias for base in bases],
            [layer.lora_A[name].weight.to(kind) for layer in self._layers],
            [layer.lora_B[name].weight.to(kind) for layer in self._layers],
            [layer.scaling[name] for layer in self._layers],
            recompute_fn_of(x),
        )
        return [y.view(*x.shape[:-1], -1) for y in ys]


def _only_adapter(layer: Any) -> str | None:
    """The one adapter that is on; None where there is none, or something else is to be done than adding its product."""
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return None
    dropout = layer.lora_dropout[names[0]]
    drops = layer.training or dropout.training
    if (
        (drops and not isinstance(dropout, nn.Identity))
        or layer.lora_variant
        or layer.lora_bias.get(names[0])
    ):
        return None
    return str(names[0])
