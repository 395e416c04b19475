"""What a run learns besides its adapter: the weights of limits, and the weight of the entropy.

A dict of numbers that a checkpoint holds. They change after a step, from its metrics, so every rank and
every resume gets the same.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace

from torch import Tensor

from skylite.algorithms.advantages import Components
from skylite.config.algorithm import AlgorithmConfig

Learned = Mapping[str, float]
WEIGHT, VIOLATION = "limit_weight/", "limit_violation/"
ENTROPY_COEF, ENTROPY = "policy/entropy_coef", "policy/entropy"


def add_limits(
    rewards: Tensor, components: Components, config: AlgorithmConfig, learned: Learned
) -> tuple[Tensor, Components]:
    """The rewards [N, G] and the weights of the components, with the learned weight of each limit.

    r - sum of weight * limited component, as in RCPO, arXiv 1805.11074. A bound is equal for all completions,
    so it moves no advantage and is left out.
    """
    weights = components.weights.clone()
    for limit in config.limits:
        weight = -limit.sign * learned.get(WEIGHT + limit.name, 0.0)
        rewards = rewards + weight * components[limit.component]
        weights[components.names.index(limit.component)] += weight
    return rewards, replace(components, weights=weights)


def limit_metrics(components: Components, config: AlgorithmConfig, learned: Learned) -> dict[str, float]:
    """Of each limit: the weight that the step used, and by how much its mean exceeds the bound."""
    metrics = {}
    for limit in config.limits:
        mean = float(components[limit.component].double().mean())
        metrics[WEIGHT + limit.name] = learned.get(WEIGHT + limit.name, 0.0)
        metrics[VIOLATION + limit.name] = limit.sign * (mean - limit.bound)
    return metrics


def entropy_coef(config: AlgorithmConfig, learned: Learned) -> float:
    """The weight of the entropy in this step; with a target 0 while the last step's entropy is above it."""
    if config.entropy_target is None:
        return config.entropy_coef
    is_low = learned.get(ENTROPY, math.inf) <= config.entropy_target
    return learned[ENTROPY_COEF] if is_low else 0.0


def learn(config: AlgorithmConfig, learned: Learned, metrics: Mapping[str, float]) -> dict[str, float]:
    """The numbers after a step with these metrics.

    Dual ascent: weight + limit_lr * violation, at least 0 (RCPO, arXiv 1805.11074). The entropy's weight
    grows by entropy_coef_delta while the entropy is at most its target, else it falls, between 0 and 1
    (Skywork-OR1, arXiv 2505.22312).
    """
    found = {
        WEIGHT + limit.name: max(
            0.0,
            learned.get(WEIGHT + limit.name, 0.0) + config.limit_lr * metrics[VIOLATION + limit.name],
        )
        for limit in config.limits
    }
    if config.entropy_target is not None:
        is_low = metrics[ENTROPY] <= config.entropy_target
        change = config.entropy_coef_delta if is_low else -config.entropy_coef_delta
        coef = learned.get(ENTROPY_COEF, config.entropy_coef) + change
        found |= {ENTROPY: metrics[ENTROPY], ENTROPY_COEF: min(1.0, max(0.0, coef))}
    return found
