"""Passes without gradient that some algorithms need before they can learn: old logprobs, reference, values, choice of tokens."""

from __future__ import annotations

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
from skylite.config.train import TrainConfig
from skylite.model.distributed import Dist
from skylite.model.policy import Policy, reference_policy, score
from skylite.trainer.assign_advantages import kl_in_reward
from skylite.trainer.critic import Critic, predict_values
from skylite.trainer.micro_batch import MicroBatch, MiniBatch


def must_look(config: TrainConfig) -> bool:
    """Whether the training pass alone does not tell enough."""
    return needs_old(config) or config.algorithm.uses_critic


def needs_old(config: TrainConfig) -> bool:
    """Whether logprobs are needed before the training pass. With one update and a plain loss they are not: old is policy."""
    algorithm = config.algorithm
    chooses = algorithm.selects_by_cov or algorithm.top_entropy_quantile < 1
    return algorithm.updates_per_step > 1 or chooses or kl_in_reward(algorithm)


@torch.no_grad()
def look(policy: Policy, critic: Critic | None, micro: MicroBatch, config: TrainConfig) -> None:
    """Fill in what the step needs to know of a micro-batch before its first update."""
    if needs_old(config):
        micro.old_logprobs, micro.entropies = score(policy, micro.tokens, config.rollout.temperature)
    if kl_in_reward(config.algorithm):
        assert micro.old_logprobs is not None
        estimate = KL_ESTIMATORS[config.algorithm.kl_estimator]
        micro.kl_penalty = config.algorithm.kl_coef * estimate(
            micro.old_logprobs, ref_logprobs(policy, micro, config)
        )
    if critic is not None:
        micro.values = predict_values(policy, critic, micro.tokens)


@torch.no_grad()
def ref_logprobs(policy: Policy, micro: MicroBatch, config: TrainConfig) -> Tensor:
    """[C] of the KL's reference."""
    with reference_policy(policy):
        return score(policy, micro.tokens, config.rollout.temperature)[0]


@torch.no_grad()
def choose_tokens(
    policy: Policy, mini_batch: MiniBatch, config: TrainConfig, dist: Dist, step: int, update: int
) -> None:
    """Fill in `selected` and `entropy_mask` for the coming update, by the policy as it is now and among the tokens of all ranks."""
    algorithm = config.algorithm
    if not (algorithm.selects_by_cov or algorithm.top_entropy_quantile < 1):
        return
    now = [_current(policy, micro, config, first=update == 0) for micro in mini_batch.micro_batches]
    if algorithm.top_entropy_quantile < 1:
        entropies = _all(
            [e[m.token_weights > 0] for m, (_, e) in zip(mini_batch.micro_batches, now, strict=True)], dist
        )
        threshold = entropy_threshold(entropies, algorithm.top_entropy_quantile)
        for micro, (_, entropy) in zip(mini_batch.micro_batches, now, strict=True):
            micro.entropy_mask = entropy >= threshold
    if algorithm.selects_by_cov:
        _choose_by_cov(
            mini_batch.micro_batches, [logprobs for logprobs, _ in now], config, dist, step, update
        )


def _current(policy: Policy, micro: MicroBatch, config: TrainConfig, first: bool) -> tuple[Tensor, Tensor]:
    """Logprobs and entropies of the policy as it is; before the first update they are known."""
    if first and micro.old_logprobs is not None and micro.entropies is not None:
        return micro.old_logprobs, micro.entropies
    return score(policy, micro.tokens, config.rollout.temperature)


def _choose_by_cov(
    micros: list[MicroBatch], logprobs: list[Tensor], config: TrainConfig, dist: Dist, step: int, update: int
) -> None:
    """Every rank sees all tokens in the same order, so all choose the same ones, however the batch is cut."""
    algorithm, counted = config.algorithm, [m.token_weights > 0 for m in micros]
    clipped = [_clipped(m, p, config) for m, p in zip(micros, logprobs, strict=True)]
    columns = [[m.keys for m in micros], [m.advantages for m in micros], logprobs, clipped]
    keys, advantages, policy, is_out = (
        _all([x[c] for x, c in zip(column, counted, strict=True)], dist) for column in columns
    )
    order = torch.argsort(keys)
    keys, cov = keys[order], covariances(advantages[order], policy[order])
    if algorithm.policy_loss == "kl_cov":
        chosen = kl_cov_selection(cov, algorithm.cov_frac)
    else:
        seed = int(np.random.SeedSequence([config.seed, step, update]).generate_state(1)[0])
        generator = torch.Generator().manual_seed(seed)
        bounds = algorithm.clip_cov_low, algorithm.clip_cov_high
        chosen = clip_cov_selection(cov, is_out[order].bool(), algorithm.cov_frac, *bounds, generator)
    for micro in micros:
        micro.selected = torch.isin(micro.keys, keys[chosen])


def _clipped(micro: MicroBatch, logprobs: Tensor, config: TrainConfig) -> Tensor:
    assert micro.old_logprobs is not None
    x = LossInputs(
        policy_logprobs=logprobs, old_logprobs=micro.old_logprobs, advantages=micro.advantages,
        sequences=micro.tokens.sequences, num_sequences=micro.tokens.num_sequences,
    )  # fmt: skip
    return is_clipped(x, config.algorithm)


def _all(parts: list[Tensor], dist: Dist) -> Tensor:
    """The values of all micro-batches of all ranks, float64."""
    own = (
        torch.cat([p.double() for p in parts])
        if parts
        else torch.zeros(0, dtype=torch.float64, device=dist.device)
    )
    return dist.all_gather(own)
