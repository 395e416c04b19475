"""One training step: pack, precompute, assign_advantages; then per update forward_backward and optim_step."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.importance import importance_weights
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import LossInputs, is_clipped, ratio_of, value_loss
from skylite.config.train import TrainConfig
from skylite.model.policy import Policy, lora_dropout, score
from skylite.model.process_group import Dist
from skylite.trainer.assign_advantages import assign_advantages
from skylite.trainer.chosen_algorithm import policy_loss
from skylite.trainer.critic import Critic, predict_values
from skylite.trainer.metrics import MetricSums, step_metrics
from skylite.trainer.micro_batch_plan import arrange
from skylite.trainer.micro_batches import MicroBatch, pack
from skylite.trainer.optimizer import FlatAdamW
from skylite.trainer.precompute_logprobs import (
    Precomputed,
    TokenChoice,
    precompute,
    ref_logprobs,
    select_tokens,
)
from skylite.trainer.process_memory import release_cached_memory
from skylite.trainer.rollout_gaps import rollout_gaps
from skylite.types import Group


def train_step(
    policy: Policy,
    optimizer: FlatAdamW,
    groups: Sequence[Group],
    step: int,
    config: TrainConfig,
    dist: Dist,
    critic: Critic | None = None,
    facts: dict[str, Any] | None = None,
) -> dict[str, float]:
    """Train on a step's groups; every rank gets all of them. Returns metrics, the same on every rank.

    `facts` receives what the step file holds besides metrics.

    Up to rounding, the result does not depend on the number of micro-batches or ranks. Raises
    TrainingDiverged, and leaves the weights unchanged, if a gradient is not finite.
    """
    rates = set_learning_rates(optimizer, critic, step, config)
    seed_dropout(config.seed, step, dist.dp_rank)

    batch = arrange(groups, config.algorithm)
    updates = pack(batch, policy, config, dist)
    micro_batches = [micro for update in updates for micro in update]
    known = [precompute(policy, critic, micro, config) for micro in micro_batches]
    advantages, returns = assign_advantages(batch, micro_batches, known, config.algorithm, dist)

    sums, first, scored = MetricSums(), 0, list[tuple[Tensor, Tensor]]()
    for index, update in enumerate(updates):
        own = slice(first, first + len(update))  # in the lists of all micro-batches
        sums.scored = scored if index == 0 else None
        choices = select_tokens(policy, update, known[own], advantages[own], config, dist, step, index)
        forward_backward(policy, optimizer, update, known[own], advantages[own], choices, config, sums)
        sums.grad_norms.append(optim_step(optimizer, dist))
        if critic is not None:
            critic_forward_backward(policy, critic, update, known[own], returns[own], sums)
            sums.critic_grad_norms.append(optim_step(critic.optimizer, dist))
        first = own.stop
    if facts is not None:
        facts["rollout_gaps"] = rollout_gaps(batch, scored, step, config, dist)
    return step_metrics(batch, sums, config, dist) | rates


def set_learning_rates(
    optimizer: FlatAdamW, critic: Critic | None, step: int, config: TrainConfig
) -> dict[str, float]:
    """Set the learning rates of `step`; returns them as metrics."""
    rates = {"optim/lr": optimizer.set_rate(step, config.num_steps, config.optim)}
    if critic is not None:
        rates["critic/lr"] = critic.optimizer.set_rate(step, config.num_steps, config.optim)
    return rates


def seed_dropout(seed: int, step: int, rank: int) -> None:
    """Seed torch from (seed, step, rank), so that a resumed run draws the same dropout masks."""
    torch.manual_seed(int(np.random.SeedSequence([seed, step, rank]).generate_state(1)[0]))


def forward_backward(
    policy: Policy,
    optimizer: FlatAdamW,
    micro_batches: Sequence[MicroBatch],
    known: Sequence[Precomputed],
    advantages: Sequence[Tensor],
    choices: Sequence[TokenChoice],
    config: TrainConfig,
    sums: MetricSums,
) -> None:
    """Sum the gradients of an update's micro-batches into `optimizer.grads`."""
    optimizer.grads.zero_()
    for row in zip(micro_batches, known, advantages, choices, strict=True):
        release_cached_memory()
        _forward_backward_micro(policy, *row, config, sums)
    release_cached_memory()


def optim_step(optimizer: FlatAdamW, dist: Dist) -> float:
    """Sum the gradient over ranks, clip, update. Returns the norm. Raises TrainingDiverged if not finite."""
    return optimizer.update(dist)


def _forward_backward_micro(
    policy: Policy,
    micro: MicroBatch,
    known: Precomputed,
    advantages: Tensor,
    choice: TokenChoice,
    config: TrainConfig,
    sums: MetricSums,
) -> None:
    """A separate function, so that its graph is freed before the next micro-batch."""
    # The reference logprobs for the KL in the loss are computed here: only one micro-batch's are in memory.
    in_loss = config.algorithm.uses_ref and not config.algorithm.kl_in_reward
    ref = ref_logprobs(policy, micro, config) if in_loss else None
    with lora_dropout(policy, active=True):  # also around backward, which may recompute activations
        logprobs, entropies = score(policy, micro.tokens, config.rollout.temperature)
        loss, found = micro_batch_loss(micro, known, advantages, choice, logprobs, entropies, ref, config)
        loss.backward()  # type: ignore[no-untyped-call]
    sums.add(found)
    sums.add_mismatch(micro, logprobs.detach())
    # With dropout, only the precomputed logprobs are those of the version that sampled.
    without_dropout = logprobs.detach() if config.lora.dropout == 0 else known.old_logprobs
    if sums.scored is not None and without_dropout is not None:
        sums.scored.append((micro.keys, without_dropout - micro.sampling_logprobs))


def micro_batch_loss(
    micro: MicroBatch,
    known: Precomputed,
    advantages: Tensor,
    choice: TokenChoice,
    logprobs: Tensor,
    entropies: Tensor,
    ref: Tensor | None,
    config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the loss, with gradient, and its metrics as sums over tokens.

    loss = sum of weight * (policy loss * importance weight + kl_coef * KL) - entropy_coef * mean entropy.
    """
    algorithm, (weights, selected) = config.algorithm, choice
    x = LossInputs(
        policy_logprobs=logprobs,
        old_logprobs=logprobs.detach() if known.old_logprobs is None else known.old_logprobs,
        advantages=advantages,
        segments=micro.tokens.segments,
        num_segments=micro.tokens.num_segments,
        selected=selected,
    )
    importance, sums = importance_weights(
        x.old_logprobs, micro.sampling_logprobs, x.segments, x.num_segments, config.importance
    )
    loss = (policy_loss(algorithm.policy_loss)(x, algorithm) * importance * weights).sum()
    sums |= {
        "loss/policy": loss.detach(),
        "policy/entropy": entropies.detach().sum(),
        "policy/ratio_mean": ratio_of(x, algorithm).detach().sum(),
        "policy/clipped_frac": is_clipped(x, algorithm).sum(),
        "mismatch/logprob_diff_mean": (logprobs - micro.sampling_logprobs).detach().abs().sum(),
    }
    if ref is not None:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logprobs, ref)
        loss = loss + algorithm.kl_coef * (kl * micro.token_weights).sum()
        sums["policy/kl_ref"] = kl.detach().sum()
    if known.kl_penalty is not None:
        sums["policy/kl_ref"] = known.kl_penalty.sum() / algorithm.kl_coef
    if algorithm.entropy_coef != 0:
        num_tokens = max(1, micro.num_update_tokens)
        loss = loss - algorithm.entropy_coef * (entropies * micro.counted).sum() / num_tokens
    return loss, sums


def critic_forward_backward(
    policy: Policy,
    critic: Critic,
    micro_batches: Sequence[MicroBatch],
    known: Sequence[Precomputed],
    returns: Sequence[Tensor],
    sums: MetricSums,
) -> None:
    """Sum the critic's gradients over the same tokens. Its loss is the mean clipped squared error."""
    critic.optimizer.grads.zero_()
    for micro, found, targets in zip(micro_batches, known, returns, strict=True):
        assert found.values is not None
        old_values, counted = found.values, micro.counted
        values = predict_values(policy, critic, micro.tokens)
        losses = value_loss(values, old_values, targets, critic.config.clip)
        loss = (losses * counted).sum() / max(1, micro.num_update_tokens)
        loss.backward()  # type: ignore[no-untyped-call]
        # Factors instead of indices: an index by a mask waits for the device.
        residual, counted_returns = (targets - old_values) * counted, targets * counted
        sums.add(
            {
                "critic/loss": loss.detach(),
                "critic/tokens": counted.sum(),
                "critic/value_mean": (old_values * counted).sum(),
                "critic/return_mean": counted_returns.sum(),
                "critic/return_squares": counted_returns.square().sum(),
                "critic/residual": residual.sum(),
                "critic/residual_squares": residual.square().sum(),
            }
        )
