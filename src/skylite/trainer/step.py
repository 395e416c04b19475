"""One training step: advantages, micro-batches, loss, one or several AdamW updates."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from skylite.algorithms.importance import importance_weights
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import POLICY_LOSSES, LossInputs, is_clipped, ratio_of, value_loss
from skylite.config.train import TrainConfig
from skylite.model.distributed import Dist
from skylite.model.policy import Policy, lora_dropout, score
from skylite.run.rollout_file import TrainSample
from skylite.trainer.assign_advantages import assign_advantages, kl_in_reward, known_advantages
from skylite.trainer.batching import arrange
from skylite.trainer.critic import Critic, predict_values
from skylite.trainer.memory import release_cached_memory
from skylite.trainer.metrics import Totals, metrics_of_step
from skylite.trainer.micro_batch import MicroBatch, MiniBatch, mini_batches
from skylite.trainer.optimizer import FlatAdamW
from skylite.trainer.precompute import choose_tokens, look, must_look, ref_logprobs


def train_step(
    policy: Policy,
    optimizer: FlatAdamW,
    samples: Sequence[TrainSample],
    step: int,
    config: TrainConfig,
    dist: Dist,
    critic: Critic | None = None,
) -> dict[str, float]:
    """Learn from a step's samples; every rank is given all of them. Returns metrics, the same on every rank.

    The result does not depend on how the batch is cut into micro-batches or ranks, up to rounding. Raises TrainingDiverged, and
    leaves the weights alone, when a gradient is not finite.
    """
    batch = arrange(samples)
    known = known_advantages(batch, config.algorithm)
    minis = mini_batches(batch, known, policy, config, dist)
    micros = [micro for mini in minis for micro in mini.micro_batches]
    rates = {"optim/lr": optimizer.set_rate(step, config.num_steps, config.optim)}
    if critic is not None:
        rates["critic/lr"] = critic.optimizer.set_rate(step, config.num_steps, config.optim)
    torch.manual_seed(int(np.random.SeedSequence([config.seed, step, dist.dp_rank]).generate_state(1)[0]))
    if must_look(config):
        for micro in micros:
            look(policy, critic, micro, config)
    if known is None:
        assign_advantages(batch, micros, config, dist)
    totals = Totals()
    for index, mini in enumerate(minis):
        choose_tokens(policy, mini, config, dist, step, index)
        learn(policy, optimizer, mini, config, totals)
        totals.grad_norms.append(optimizer.update(dist, step))
        if critic is not None:
            learn_values(policy, critic, mini, totals)
            totals.critic_grad_norms.append(critic.optimizer.update(dist, step))
    return metrics_of_step(batch, minis, totals, config, dist) | rates


def learn(
    policy: Policy, optimizer: FlatAdamW, mini_batch: MiniBatch, config: TrainConfig, totals: Totals
) -> None:
    """Forward and backward of every micro-batch into `optimizer.grads`."""
    optimizer.grads.zero_()
    for micro in mini_batch.micro_batches:
        release_cached_memory()
        learn_from(policy, micro, mini_batch.size.num_tokens, config, totals)
    release_cached_memory()


def learn_from(
    policy: Policy, micro: MicroBatch, num_tokens: int, config: TrainConfig, totals: Totals
) -> None:
    """One forward and backward; a function of its own, so that nothing of its graph is alive when the next one begins."""
    # With the KL in the loss its reference is asked here, so that only one micro-batch of it is held.
    in_loss = config.algorithm.uses_ref and not kl_in_reward(config.algorithm)
    ref = ref_logprobs(policy, micro, config) if in_loss else None
    with lora_dropout(policy, active=True):  # backward too: it may make activations again
        logprobs, entropies = score(policy, micro.tokens, config.rollout.temperature)
        loss, sums = micro_batch_loss(micro, logprobs, entropies, ref, num_tokens, config)
        loss.backward()  # type: ignore[no-untyped-call]
    totals.add(sums | {"tokens/unique": torch.tensor(micro.tokens.num_nodes)})
    totals.see_worst(micro, logprobs.detach())


def micro_batch_loss(
    micro: MicroBatch,
    logprobs: Tensor,
    entropies: Tensor,
    ref: Tensor | None,
    num_tokens: int,
    config: TrainConfig,
) -> tuple[Tensor, dict[str, Tensor]]:
    """This micro-batch's share of the loss, with gradient, and its metrics as sums over tokens.

    loss = sum of weight * (policy loss * importance weight + kl_coef * KL), minus entropy_coef times the mean entropy.
    """
    algorithm = config.algorithm
    x = LossInputs(
        policy_logprobs=logprobs,
        old_logprobs=logprobs.detach() if micro.old_logprobs is None else micro.old_logprobs,
        advantages=micro.advantages,
        sequences=micro.tokens.sequences,
        num_sequences=micro.tokens.num_sequences,
        selected=micro.selected,
    )
    importance, sums = importance_weights(
        x.old_logprobs, micro.rollout_logprobs, x.sequences, x.num_sequences, config.importance
    )
    weights = micro.token_weights if micro.entropy_mask is None else micro.token_weights * micro.entropy_mask
    loss = (POLICY_LOSSES[algorithm.policy_loss](x, algorithm) * importance * weights).sum()
    sums |= {
        "loss/policy": loss.detach(),
        "policy/entropy": entropies.detach().sum(),
        "policy/ratio_mean": ratio_of(x, algorithm).detach().sum(),
        "policy/clipped_frac": is_clipped(x, algorithm).sum(),
        "mismatch/logprob_diff_mean": (logprobs - micro.rollout_logprobs).detach().abs().sum(),
    }
    if ref is not None:
        kl = KL_ESTIMATORS[algorithm.kl_estimator](logprobs, ref)
        loss = loss + algorithm.kl_coef * (kl * micro.token_weights).sum()
        sums["policy/kl_ref"] = kl.detach().sum()
    if micro.kl_penalty is not None:
        sums["policy/kl_ref"] = micro.kl_penalty.sum() / algorithm.kl_coef
    if algorithm.entropy_coef != 0:
        loss = loss - algorithm.entropy_coef * (entropies * (micro.token_weights > 0)).sum() / max(
            1, num_tokens
        )
    return loss, sums


def learn_values(policy: Policy, critic: Critic, mini_batch: MiniBatch, totals: Totals) -> None:
    """Forward and backward of the critic over the same tokens: the mean over tokens of the clipped squared error."""
    critic.optimizer.grads.zero_()
    for micro in mini_batch.micro_batches:
        assert micro.values is not None
        returns = micro.values if micro.returns is None else micro.returns
        counted = micro.token_weights > 0
        values = predict_values(policy, critic, micro.tokens)
        loss = (value_loss(values, micro.values, returns, critic.config.clip) * counted).sum() / max(
            1, mini_batch.size.num_tokens
        )
        loss.backward()  # type: ignore[no-untyped-call]
        residual, found = (returns - micro.values)[counted], returns[counted]
        totals.add(
            {
                "critic/loss": loss.detach(),
                "critic/tokens": counted.sum(),
                "critic/value_mean": micro.values[counted].sum(),
                "critic/return_mean": found.sum(),
                "critic/return_squares": found.square().sum(),
                "critic/residual": residual.sum(),
                "critic/residual_squares": residual.square().sum(),
            }
        )
