"""Norms, entropies and log-probabilities keep float32 sums under autocast, forward and backward.

Autocast computes torch.linalg.vecdot in bfloat16, which is wrong by up to 0.4 %. If any `row_dot` of
fused_ops.py or chunked_logprobs.py becomes a vecdot, a test here fails. The references are in float64.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from skylite.model.chunked_logprobs import head_logprobs, token_logprobs
from skylite.model.fused_ops import rms_norm

TEMPERATURE = 4.0
TOLERANCE = 1e-5
"""A sum in bfloat16 is wrong by more than 5e-4 in each test."""
ROWS, TARGETS = torch.arange(16), torch.arange(16) * 7


def in_bf16() -> Any:
    return torch.autocast("cpu", torch.bfloat16)


def draw(*size: int, seed: int = 0) -> Tensor:
    return torch.randn(size, generator=torch.Generator().manual_seed(seed))


def gap(got: Tensor, expected: Tensor) -> float:
    """The largest error, relative to the largest value."""
    got, expected = got.detach().double(), expected.detach()
    return float((got - expected).abs().max() / expected.abs().max())


def expected_norm(x: Tensor, gain: Tensor) -> Tensor:
    """The RMS norm by its formula, in float64."""
    x = x.double()
    return gain.double() * x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt()


def expected_logprobs(logits: Tensor) -> tuple[Tensor, Tensor]:
    """Logprobs of TARGETS and entropies of all rows, in float64."""
    logprobs = torch.log_softmax(logits.double() / TEMPERATURE, dim=1)
    return logprobs[ROWS, TARGETS], -(logprobs.exp() * logprobs).sum(dim=1)


def test_autocast_rounds_torchs_own_dot_product() -> None:
    x = draw(16, 512)
    with in_bf16():
        rounded = torch.linalg.vecdot(x, x)
    assert gap(rounded, x.double().square().sum(-1)) > 5e-4


def test_a_norm_in_float32() -> None:
    x, gain = draw(16, 512), draw(512, seed=1)
    with in_bf16():
        got = rms_norm(x, gain, 1e-5, recompute=False)
    assert gap(got, expected_norm(x, gain)) < TOLERANCE


def test_a_norm_of_bfloat16_is_rounded_once() -> None:
    """The output is the exact value, rounded to bfloat16."""
    x, gain = draw(16, 512).bfloat16(), draw(512, seed=1).bfloat16()
    with in_bf16():
        got = rms_norm(x, gain, 1e-5, recompute=False)
    assert got.dtype == torch.bfloat16
    assert (got == expected_norm(x, gain).bfloat16()).float().mean() > 0.999


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_the_gradient_of_a_norm(dtype: torch.dtype) -> None:
    """Where the gradient points along x, the sum over the row cancels nearly all of it.

    So a wrong sum is as large as the rest.
    """
    x, gain = draw(16, 512).to(dtype).requires_grad_(), torch.ones(512, dtype=dtype)
    upstream = (x.detach() + 0.05 * draw(16, 512, seed=1)).to(dtype)
    (expected,) = torch.autograd.grad(expected_norm(x, gain), x, upstream.double())
    with in_bf16():
        (got,) = torch.autograd.grad(rms_norm(x, gain, 1e-5, recompute=False), x, upstream)
    assert got.dtype == dtype
    assert gap(got, expected) < (1e-4 if dtype == torch.float32 else 1e-2)


def test_entropies_of_logits_and_their_gradient() -> None:
    logits = (12 * draw(16, 500)).requires_grad_()
    upstream = draw(2, 16, seed=1)
    logprobs, entropies = expected_logprobs(logits)
    (expected,) = torch.autograd.grad([logprobs, entropies], logits, [*upstream.double()])
    with in_bf16():
        got = token_logprobs(logits * 1.0, ROWS, TARGETS, TEMPERATURE)
        (grad,) = torch.autograd.grad(got, logits, [*upstream])
    assert gap(got[0], logprobs) < TOLERANCE
    assert gap(got[1], entropies) < TOLERANCE
    assert gap(grad, expected) < TOLERANCE


def exact_head() -> tuple[Tensor, Tensor]:
    """Hidden states and the weight of an LM head. They and the logits are integers that bfloat16 holds."""
    hidden, weight = draw(16, 32).sign(), draw(500, 32, seed=1).abs().mul(1.5).round().clamp(max=4)
    assert (hidden @ weight.t()).abs().max() <= 256
    return hidden, weight


def test_entropies_of_a_bfloat16_head_and_their_gradient() -> None:
    """The products of backward stay in bfloat16, so the gradient's tolerance is wider."""
    hidden, weight = exact_head()
    hidden.requires_grad_()
    logprobs, entropies = expected_logprobs(hidden @ weight.t())
    upstream = draw(16, seed=1)
    (expected,) = torch.autograd.grad(entropies, hidden, upstream.double())
    narrow = hidden.detach().bfloat16().requires_grad_()
    with in_bf16():
        got = head_logprobs(narrow, weight.bfloat16(), None, ROWS, TARGETS, TEMPERATURE)
        (grad,) = torch.autograd.grad(got[1], narrow, upstream)
    assert gap(got[0], logprobs) < TOLERANCE
    assert gap(got[1], entropies) < TOLERANCE
    assert gap(grad, expected) < 1e-2


def test_entropies_of_a_float32_head_and_their_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The head's product is exempt from autocast here, so that only sums could be in bfloat16."""
    linear = functional.linear

    def exempt(*args: Any) -> Tensor:
        with torch.autocast("cpu", enabled=False):
            return linear(*args)

    monkeypatch.setattr(functional, "linear", exempt)
    hidden, weight = exact_head()
    hidden.requires_grad_()
    logprobs, entropies = expected_logprobs(hidden @ weight.t())
    upstream = draw(2, 16, seed=1)
    (expected,) = torch.autograd.grad([logprobs, entropies], hidden, [*upstream.double()])
    with in_bf16():
        got = head_logprobs(hidden, weight, None, ROWS, TARGETS, TEMPERATURE)
    (grad,) = torch.autograd.grad(got, hidden, [*upstream])
    assert gap(got[0], logprobs) < TOLERANCE
    assert gap(got[1], entropies) < TOLERANCE
    assert gap(grad, expected) < TOLERANCE
