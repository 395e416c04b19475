"""The losses of the verbs, with numbers by hand."""

from __future__ import annotations

import math

import pytest
import torch

from skylite.algorithms.token_losses import TOKEN_LOSSES
from skylite.verbs import LOSS_FORMS

Case = tuple[str, dict[str, list[float]], dict[str, float], list[float], list[float]]
HALF, QUARTER = math.log(0.5), math.log(0.25)
"""Logprobs of the policy: 1/2 and 1/4."""
CASES: dict[str, Case] = {
    # -w log p; the gradient is -w.
    "cross entropy": ("cross_entropy", {"weights": [2.0, 0.0]}, {}, [2 * math.log(2), 0.0], [-2.0, 0.0]),
    # Ratios 2 and 1/2: -r A, and its gradient in log p is the same.
    "importance": (
        "importance_sampling",
        {"logprobs": [QUARTER, HALF], "advantages": [1.0, -3.0]},
        {},
        [-2.0, 1.5],
        [-2.0, 1.5],
    ),
    # r = 2 is clipped to 1.2 for A > 0, r = 1/2 to 0.8 for A < 0: neither has a gradient.
    "ppo clips": (
        "ppo",
        {"logprobs": [QUARTER, HALF], "advantages": [1.0, -3.0]},
        {},
        [-1.2, 2.4],
        [0.0, 0.0],
    ),
    # With other signs of A the minimum is the ratio itself.
    "ppo lets go back": (
        "ppo",
        {"logprobs": [QUARTER, HALF], "advantages": [-1.0, 3.0]},
        {},
        [2.0, -1.5],
        [2.0, -1.5],
    ),
    "ppo, own clips": (
        "ppo",
        {"logprobs": [QUARTER, HALF], "advantages": [1.0, -3.0]},
        {"clip_low_threshold": 0.75, "clip_high_threshold": 1.5},
        [-1.5, 2.25],
        [0.0, 0.0],
    ),
    # Clipped to 4 and 0 by default, so the ratios stay: -r A log p, with -r A as gradient.
    "cispo": (
        "cispo",
        {"logprobs": [QUARTER, HALF], "advantages": [1.0, -3.0]},
        {},
        [2 * math.log(2), -1.5 * math.log(4)],
        [-2.0, 1.5],
    ),
    "cispo, own clips": (
        "cispo",
        {"logprobs": [QUARTER, HALF], "advantages": [1.0, -3.0]},
        {"clip_low_threshold": 0.8, "clip_high_threshold": 1.2},
        [1.2 * math.log(2), -2.4 * math.log(4)],
        [-1.2, 2.4],
    ),
    # (log r)^2 = log(2)^2 for both: beta / 2 (log r)^2 - A log p, and beta log r - A.
    "dro": (
        "dro",
        {"logprobs": [QUARTER, HALF], "advantages": [1.0, -3.0]},
        {"beta": 0.5},
        [0.25 * math.log(2) ** 2 + math.log(2), 0.25 * math.log(2) ** 2 - 3 * math.log(4)],
        [0.5 * math.log(2) - 1, -0.5 * math.log(2) + 3],
    ),
}


@pytest.mark.parametrize("name", CASES)
def test_each_loss_and_its_gradient(name: str):
    loss, inputs, settings, values, gradient = CASES[name]
    logprobs = torch.tensor([HALF, QUARTER], requires_grad=True)
    tensors = {key: torch.tensor(value) for key, value in inputs.items()}
    got = TOKEN_LOSSES[loss](logprobs, tensors, {**LOSS_FORMS[loss].settings, **settings})
    got.sum().backward()
    assert got.tolist() == pytest.approx(values, abs=1e-6)
    assert logprobs.grad is not None
    assert logprobs.grad.tolist() == pytest.approx(gradient, abs=1e-6)


def test_each_loss_has_a_form_and_reads_nothing_else():
    assert TOKEN_LOSSES.keys() == LOSS_FORMS.keys()
    for name, form in LOSS_FORMS.items():
        inputs = {key: torch.ones(1) for key in form.inputs}
        TOKEN_LOSSES[name](torch.zeros(1), inputs, form.settings)
