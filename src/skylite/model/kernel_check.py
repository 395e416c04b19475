"""Compares the Triton kernels with the torch forms that they replace, on the device that will run them.

It comes before every other import of triton_kernels.py: without triton, or where triton cannot compile, the
torch forms stay.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor, nn

from skylite.model.chunked_logprobs import head_logprobs
from skylite.model.fused_ops import gated_activation, rms_norm

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 1e-2}
"""Largest norm of a difference, relative to the norm of the float64 result. Rounding stays below it."""
EPS = 1e-6


def kernel_fault(device: torch.device, dtype: torch.dtype, widths: Sequence[int]) -> str | None:
    """Why the kernels cannot be used on this device in this dtype; None if they compute what torch does.

    widths: of the model's norms. Raises torch.OutOfMemoryError.
    """
    try:
        differences = kernel_differences(device, dtype, widths)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # noqa: BLE001 -- whatever triton and the compilers that it calls raise
        line = str(error).strip().partition("\n")[0]
        return f"{type(error).__name__}: {line}"
    # Not "> ...", which a difference that is not a number would pass.
    wrong = [f"{name} differs by {d:.1e}" for name, d in differences.items() if not d <= TOLERANCE[dtype]]
    return ", ".join(wrong) or None


def kernel_differences(
    device: torch.device, dtype: torch.dtype, widths: Sequence[int], vocab: int = 1003
) -> dict[str, float]:
    """For each kernel, the worst relative difference of its outputs and gradients from float64's torch form.

    On random inputs and gradients, the same at every call.
    """
    from skylite.model import triton_kernels as kernels

    random = torch.Generator(device).manual_seed(0)

    def make(*size: int) -> Tensor:
        return torch.randn(size, generator=random, device=device).to(dtype)

    found: dict[str, float] = {}
    for width in widths:
        x, weight = make(37, width), make(width)
        found[f"norm of {width}"] = _worst(
            lambda x, w=weight: rms_norm(x, 1 + w.to(x.dtype), EPS, recompute=False),
            lambda x, w=weight: kernels.rms_norm(x, w, 1.0, EPS, recompute=False),
            [x],
        )
    for name, act in (("SiLU", nn.SiLU()), ("GELU", nn.GELU("tanh"))):
        found[name] = _worst(
            lambda gate, up, act=act: gated_activation(gate, up, act, recompute=False),
            lambda gate, up, name=name: kernels.gated_activation(gate, up, name == "GELU", recompute=False),
            [3 * make(5, 1000), make(5, 1000)],
        )
    angles = make(1, 19, 64)
    found["rotary embedding"] = _worst(
        lambda q, k: _rotated(q, k, angles.cos(), angles.sin()),
        lambda q, k: kernels.rotary_embedding(q, k, angles.cos(), angles.sin()),
        [make(2, 19, 6, 64).transpose(1, 2), make(2, 19, 2, 64).transpose(1, 2)],
    )
    found["LM head"] = _head_difference(make, vocab)
    return found


def _head_difference(make: Callable[..., Tensor], vocab: int) -> float:
    """With rows that predict no token, one, and several."""
    hidden, weight, bias = make(9, 64), make(vocab, 64) / 4, make(vocab)
    rows = torch.tensor([0, 1, 1, 3, 8, 5, 5, 5, 4], device=hidden.device)
    targets = torch.tensor([5, 0, vocab - 1, 7, 7, 3, 3, 9, 11], device=hidden.device)
    before = np.concatenate([[0], np.cumsum(np.bincount(rows.cpu().numpy(), minlength=9))])

    def head(kernels: bool, entropy: bool) -> Callable[[Tensor], Tensor]:
        def run(x: Tensor) -> Tensor:
            w, b = weight.to(x.dtype), bias.to(x.dtype)
            return torch.stack(
                head_logprobs(x, w, b, rows, targets, 0.7, None, before, kernels)[: 1 + entropy]
            )

        return run

    return float(np.max([_worst(head(False, e), head(True, e), [hidden]) for e in (False, True)]))


def _rotated(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    """As transformers' models do."""

    def rotated(x: Tensor) -> Tensor:
        first, second = x.chunk(2, dim=-1)
        return x * cos[:, None] + torch.cat((-second, first), dim=-1) * sin[:, None]

    return rotated(q), rotated(k)


def _worst(
    reference: Callable[..., Tensor | tuple[Tensor, ...]],
    kernel: Callable[..., Tensor | tuple[Tensor, ...]],
    inputs: Sequence[Tensor],
) -> float:
    """The largest |kernel - reference| / |reference| of the outputs and of the inputs' gradients."""
    mine = [x.detach().requires_grad_() for x in inputs]
    wide = [x.detach().double().requires_grad_() for x in inputs]
    outputs, right = _listed(kernel(*mine)), _listed(reference(*wide))
    grads = [torch.cos(torch.arange(y.numel(), device=y.device)).view(y.shape).to(y.dtype) for y in outputs]
    results = [*outputs, *torch.autograd.grad(outputs, mine, grads)]
    references = [*right, *torch.autograd.grad(right, wide, [g.double() for g in grads])]
    return float(np.max([relative_difference(a, b) for a, b in zip(results, references, strict=True)]))


def _listed(outputs: Tensor | tuple[Tensor, ...]) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else list(outputs)


def relative_difference(a: Tensor, b: Tensor) -> float:
    """|a - b| / |b|, of the tensors' norms in float64."""
    a, b = a.detach().double(), b.detach().double()
    return float((a - b).norm() / b.norm())
