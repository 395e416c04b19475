"""Every name that a setting accepts has a function of its own, so that none runs as another."""

from __future__ import annotations

from typing import get_args

from skylite.algorithms.advantages import GROUP_ADVANTAGES
from skylite.algorithms.losses import AGGREGATIONS, POLICY_LOSSES
from skylite.config import algorithm
from skylite.config.rollout import RewardParameters
from skylite.rewards.built_in import BUILT_IN

ALONG_TRAJECTORIES = {"reinforce++", "gae"}
"""trainer/precompute.py computes these token by token."""


def test_every_algorithm_setting_has_a_function() -> None:
    assert set(get_args(algorithm.Advantage)) == set(GROUP_ADVANTAGES) | ALONG_TRAJECTORIES
    assert set(get_args(algorithm.PolicyLoss)) == set(POLICY_LOSSES)
    assert set(get_args(algorithm.Aggregation)) == set(AGGREGATIONS)


def test_every_reward_has_a_function_of_its_own() -> None:
    parameters = RewardParameters(pattern="x", max_length=5)
    functions = [reward.function(parameters) for reward in BUILT_IN.values()]
    assert len({getattr(f, "__qualname__", type(f).__name__) for f in functions}) == len(BUILT_IN)
