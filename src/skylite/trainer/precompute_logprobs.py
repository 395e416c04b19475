"""Precompute: the forward passes without gradient that some algorithms need before an update.

They give old logprobs, the KL to the reference, the critic's values, and the choice of tokens for an update.

Old logprobs come from the training pass where they can. Without that a train phase takes 35 % longer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import LossInputs, is_clipped
from skylite.algorithms.token_selection import (
    clip_cov_selection,
    covariances,
    entropy_threshold,
    kl_cov_selection,
)
from skylite.config.algorithm import AlgorithmConfig
from skylite.config.train import TrainConfig
from skylite.model.policy import Policy, reference_policy, score
from skylite.model.process_group import Dist
from skylite.trainer.critic import Critic, predict_values
from skylite.trainer.micro_batches import MicroBatch


@dataclass(frozen=True, slots=True, kw_only=True)
class Precomputed:
    """Model outputs before the first update. All [C]; None if the algorithm does not need it."""

    old_logprobs: Tensor | None = None
    """None: in a step's only update the policy is the old policy, so the training pass computes them."""
    entropies: Tensor | None = None
    """Computed together with `old_logprobs`."""
    kl_penalty: Tensor | None = None
    """kl_coef times the KL estimate, if the KL is subtracted from the reward."""
    values: Tensor | None = None
    """The critic's values."""


TokenChoice = tuple[Tensor, Tensor | None]
"""[C] token weights of an update, and bool [C] tokens that a covariance rule selected (None: no rule)."""


@torch.no_grad()
def precompute(policy: Policy, critic: Critic | None, micro: MicroBatch, config: TrainConfig) -> Precomputed:
    """Run the forward passes that the step needs before its first update."""
    algorithm = config.algorithm
    old_logprobs = entropies = kl_penalty = None
    if needs_old_logprobs(algorithm):
        old_logprobs, entropies = score(policy, micro.tokens, config.rollout.temperature)
    if algorithm.kl_in_reward:
        assert old_logprobs is not None
        estimate = KL_ESTIMATORS[algorithm.kl_estimator]
        kl_penalty = algorithm.kl_coef * estimate(old_logprobs, ref_logprobs(policy, micro, config))
    return Precomputed(
        old_logprobs=old_logprobs,
        entropies=entropies,
        kl_penalty=kl_penalty,
        values=None if critic is None else predict_values(policy, critic, micro.tokens),
    )


def needs_old_logprobs(config: AlgorithmConfig) -> bool:
    """Whether the step needs logprobs before the training pass. One update with a plain loss needs none."""
    return config.updates_per_step > 1 or config.selects_tokens or config.kl_in_reward


@torch.no_grad()
def ref_logprobs(policy: Policy, micro: MicroBatch, config: TrainConfig) -> Tensor:
    """[C] logprobs of the KL's reference policy."""
    with reference_policy(policy):
        return score(policy, micro.tokens, config.rollout.temperature)[0]


@torch.no_grad()
def select_tokens(
    policy: Policy,
    micro_batches: Sequence[MicroBatch],
    known: Sequence[Precomputed],
    advantages: Sequence[Tensor],
    config: TrainConfig,
    dist: Dist,
    step: int,
    update: int,
) -> list[TokenChoice]:
    """Choose the tokens of the next update with the current policy, among the tokens of all ranks."""
    algorithm = config.algorithm
    weights, selected = (
        [m.token_weights for m in micro_batches],
        list[Tensor | None]([None] * len(micro_batches)),
    )
    if not algorithm.selects_tokens:
        return list(zip(weights, selected, strict=True))
    now = [_current(policy, m, k, config, update == 0) for m, k in zip(micro_batches, known, strict=True)]
    if algorithm.top_entropy_quantile < 1:
        entropies = _all([e[m.counted] for m, (_, e) in zip(micro_batches, now, strict=True)], dist)
        threshold = entropy_threshold(entropies, algorithm.top_entropy_quantile)
        weights = [w * (entropy >= threshold) for w, (_, entropy) in zip(weights, now, strict=True)]
    if algorithm.selects_by_cov:
        seed = int(np.random.SeedSequence([config.seed, step, update]).generate_state(1)[0])
        logprobs = [p for p, _ in now]
        selected = [*_choose_by_cov(micro_batches, known, advantages, logprobs, algorithm, dist, seed)]
    return list(zip(weights, selected, strict=True))


def _current(
    policy: Policy, micro: MicroBatch, known: Precomputed, config: TrainConfig, is_first_update: bool
) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the current policy. Before the first update, the precomputed ones."""
    if is_first_update and known.old_logprobs is not None and known.entropies is not None:
        return known.old_logprobs, known.entropies
    return score(policy, micro.tokens, config.rollout.temperature)


def _choose_by_cov(
    micro_batches: Sequence[MicroBatch],
    known: Sequence[Precomputed],
    advantages: Sequence[Tensor],
    logprobs: Sequence[Tensor],
    config: AlgorithmConfig,
    dist: Dist,
    seed: int,
) -> list[Tensor]:
    """Bool [C] for each micro-batch. Every rank sees all tokens in the same order, so all ranks agree."""
    rows = zip(micro_batches, known, advantages, logprobs, strict=True)
    clipped = [_clipped(*row, config) for row in rows]
    columns = [[m.keys for m in micro_batches], advantages, logprobs, clipped]
    counted = [m.counted for m in micro_batches]
    keys, adv, policy, is_out = (
        _all([x[c] for x, c in zip(column, counted, strict=True)], dist) for column in columns
    )
    order = torch.argsort(keys)
    keys, cov = keys[order], covariances(adv[order], policy[order])
    if config.policy_loss == "kl_cov":
        chosen = kl_cov_selection(cov, config.cov_frac)
    else:
        generator = torch.Generator().manual_seed(seed)
        bounds = config.clip_cov_low, config.clip_cov_high
        chosen = clip_cov_selection(cov, is_out[order].bool(), config.cov_frac, *bounds, generator)
    return [torch.isin(m.keys, keys[chosen]) for m in micro_batches]


def _clipped(
    micro: MicroBatch, known: Precomputed, advantages: Tensor, logprobs: Tensor, config: AlgorithmConfig
) -> Tensor:
    assert known.old_logprobs is not None
    x = LossInputs(
        policy_logprobs=logprobs,
        old_logprobs=known.old_logprobs,
        advantages=advantages,
        segments=micro.tokens.segments,
        num_segments=micro.tokens.num_segments,
    )
    return is_clipped(x, config)


def _all(parts: list[Tensor], dist: Dist) -> Tensor:
    """The values of all micro-batches of all ranks, float64."""
    empty = torch.zeros(0, dtype=torch.float64, device=dist.device)
    return dist.all_gather(torch.cat([p.double() for p in parts]) if parts else empty)
