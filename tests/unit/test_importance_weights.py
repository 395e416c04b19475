"""Importance weights and mismatch metrics against values computed by hand."""

import math

import pytest
import torch

from skylite.algorithms.importance import _bounded, importance_weights
from skylite.algorithms.kl import k3
from skylite.config.algorithm import ImportanceConfig

LOG2, LOG3, LOG4 = math.log(2), math.log(3), math.log(4)


def weights_of(**settings: object) -> tuple[list[float], dict[str, float]]:
    """Weights of a completion with the ratios 4 and 1/2, and of one with 1/4."""
    old = torch.tensor([LOG4, -LOG2, -LOG4], dtype=torch.float64) - 9
    rollout = torch.full((3,), -9.0, dtype=torch.float64)
    weights, sums = importance_weights(
        old.requires_grad_(), rollout, torch.tensor([0, 0, 1]), 2, ImportanceConfig(**settings)
    )
    assert not weights.requires_grad
    assert not any(s.requires_grad for s in sums.values())
    return weights.tolist(), {name: float(s) for name, s in sums.items()}


@pytest.mark.parametrize(
    ("settings", "weights", "num_changed"),
    [
        ({}, [2, 0.5, 0.25], 1),
        ({"cap": 3.0}, [3, 0.5, 0.25], 1),
        ({"mode": "mask"}, [0, 0.5, 0.25], 1),
        ({"mode": "mask", "floor": 0.3}, [0, 0.5, 0], 2),
        ({"mode": "mask", "cap": 4.5, "floor": 0.3}, [4, 0.5, 0], 1),
        ({"mode": "none"}, [1, 1, 1], 0),
        # the first completion's product of ratios is 4 / 2
        ({"level": "sequence", "cap": 3.0}, [2, 2, 0.25], 0),
        ({"level": "sequence", "cap": 1.5}, [1.5, 1.5, 0.25], 2),
        ({"level": "sequence", "mode": "mask", "cap": 1.5}, [0, 0, 0.25], 2),
        ({"level": "sequence", "mode": "mask", "cap": 3.0, "floor": 0.5}, [2, 2, 0], 1),
        ({"level": "sequence", "mode": "none"}, [1, 1, 1], 0),
    ],
)
def test_importance_weights(settings, weights, num_changed):
    got, sums = weights_of(**settings)
    assert got == pytest.approx(weights)
    assert sums["mismatch/importance_changed_frac"] == num_changed


@pytest.mark.parametrize(
    ("limit", "weights", "num_rejected"),
    [(0.95, [2, 0.5, 0.25], 0), (0.8, [0, 0, 0.25], 2), (0.5, [0, 0, 0], 3)],
)
def test_completions_far_from_the_sampler_are_rejected(limit, weights, num_rejected):
    # k3: 4 - log 4 - 1 = 1.614 and 1/2 + log 2 - 1 = 0.193, on average 0.903; 1/4 + log 4 - 1 = 0.636
    got, sums = weights_of(reject_kl=limit)
    assert got == pytest.approx(weights)
    assert sums["mismatch/rejected_frac"] == num_rejected


def test_a_completion_exactly_at_the_limit_is_kept():
    rollout, old = torch.tensor([-9.0], dtype=torch.float64), torch.tensor([-10.0], dtype=torch.float64)
    limit = float(k3(rollout, old)[0])
    for reject_kl, kept in ((limit, True), (0.999 * limit, False)):
        config = ImportanceConfig(reject_kl=reject_kl)
        weights, _ = importance_weights(old, rollout, torch.tensor([0]), 1, config)
        assert bool(weights[0] > 0) is kept


def test_mismatch_metrics_do_not_depend_on_the_weights():
    for mode in ("truncate", "mask", "none"):
        _, sums = weights_of(mode=mode)
        # 1.614 + 0.193 + 0.636 as above; ratios 4 + 1/2 + 1/4 and 16 + 1/4 + 1/16
        assert sums["mismatch/kl"] == pytest.approx(1.75 + LOG2)
        assert (sums["ess/weights"], sums["ess/squares"]) == pytest.approx((4.75, 16.3125))
    _, sums = weights_of(level="sequence")
    assert (sums["ess/weights"], sums["ess/squares"]) == pytest.approx(
        (4.25, 8.0625)
    )  # 2 + 2 + 1/4 and 4 + 4 + 1/16


@pytest.mark.parametrize("mode", ["truncate", "mask"])
def test_ratios_of_exactly_a_bound_do_not_change(mode: str) -> None:
    ratio = torch.tensor([0.5, 1.0, 2.0])
    weights, changed = _bounded(ratio, ImportanceConfig(mode=mode, cap=2.0, floor=0.5))
    assert weights.tolist() == [0.5, 1.0, 2.0]
    assert not changed.any()
