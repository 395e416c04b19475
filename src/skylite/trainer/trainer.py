"""The trainer: policies by name on one frozen base, and what can be done with them.

All ranks call each verb. `step.py` makes a step of them.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Literal

import numpy as np
import torch
from torch import Tensor, nn

from skylite.adapters.manifest import Canary
from skylite.algorithms.distillation import OnPolicyDistillation
from skylite.algorithms.dpo import DirectPreferenceOptimization, OnlineDPO
from skylite.algorithms.interface import Algorithm
from skylite.algorithms.losses import value_loss
from skylite.algorithms.policy_gradient import PolicyGradient
from skylite.algorithms.sft import SupervisedFineTuning
from skylite.config.train import RunConfig, TrainConfig
from skylite.model.chunked_divergence import Teacher
from skylite.model.policy import TEACHER, Policy, compare, lora_dropout, role_params, score
from skylite.model.process_group import Dist
from skylite.run.run_dir import RunDir
from skylite.trainer import precompute
from skylite.trainer.checkpoint import load_checkpoint, save_checkpoint, share_checkpoint
from skylite.trainer.critic import Critic, make_critic, predict_values
from skylite.trainer.metrics import MetricSums
from skylite.trainer.micro_batch_memory import release_cached_memory
from skylite.trainer.micro_batches import MicroBatch, Table, pack
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from skylite.trainer.publish_adapter import b_norm, write_adapter

PolicyName = Literal["policy", "critic"]
"""The reference policy has no parameters of its own to train: `model.policy.frozen_policy`."""


def make_algorithm(config: TrainConfig, learned: Mapping[str, float] = MappingProxyType({})) -> Algorithm:
    """The algorithm that `algorithm.name` and its settings choose. `learned`: see `Trainer.learned`."""
    algorithm = config.algorithm
    if algorithm.name == "sft":
        return SupervisedFineTuning(algorithm.updates_per_step)
    if algorithm.is_preference:
        kind = OnlineDPO if algorithm.name == "online_dpo" else DirectPreferenceOptimization
        return kind(algorithm.beta, algorithm.updates_per_step, algorithm.preference_loss == "ipo")
    if algorithm.uses_teacher:
        return OnPolicyDistillation(algorithm, config.importance, learned)
    return PolicyGradient(algorithm, config.importance, learned)


def make_trainer(policy: Policy, config: TrainConfig, dist: Dist) -> Trainer:
    """A trainer with fresh optimizers. All ranks call it."""
    optim = config.optim
    optimizer = make_optimizer(
        "policy",
        policy.lora,
        optim.lr,
        optim.max_grad_norm,
        optim,
        optim.lora_plus_ratio,
        config.trainer.offload,
    )
    critic = make_critic(policy, config, dist) if config.critic_lora is not None else None
    return Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer, critic=critic)


LEARNING_RATES = {"policy": "optim/lr", "critic": "critic/lr"}
"""Policy -> the metric of its learning rate."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Everything that a step needs."""

    config: TrainConfig
    dist: Dist
    policy: Policy
    optimizer: FlatAdamW
    critic: Critic | None = None
    learned: dict[str, float] = field(default_factory=dict)
    """What the run learns besides its adapter (algorithms/learned.py); changes in place."""

    @property
    def algorithm(self) -> Algorithm:
        return make_algorithm(self.config, self.learned)

    @property
    def optimizers(self) -> dict[PolicyName, FlatAdamW]:
        """By the name of the policy."""
        critic: dict[PolicyName, FlatAdamW] = {} if self.critic is None else {"critic": self.critic.optimizer}
        return {"policy": self.optimizer, **critic}

    @property
    def temperature(self) -> float:
        """Prepared data was not sampled, so no temperature changes its probabilities."""
        return self.config.rollout.temperature if self.algorithm.is_sampled else 1.0

    def start_step(self, step: int) -> dict[str, float]:
        """Set the learning rates of `step`, which are metrics, and seed the dropout.

        Seeded from (seed, step, rank), a resumed run draws the same dropout masks.
        """
        config = self.config
        seed = np.random.SeedSequence([config.seed, step, self.dist.dp_rank]).generate_state(1)[0]
        torch.manual_seed(int(seed))
        return {
            LEARNING_RATES[name]: x.set_rate(step, config.num_steps, config.optim)
            for name, x in self.optimizers.items()
        }

    def pack(self, table: Table) -> list[list[MicroBatch]]:
        """[updates][micro-batches of this rank]."""
        return pack(table, self.algorithm, self.policy, self.config, self.dist)

    def forward(self, micro: MicroBatch) -> MicroBatch:
        """The micro-batch with logprobs, values and the KL that the algorithm needs before an update."""
        return precompute.precompute(self.policy, self.critic, micro, self.algorithm, self.temperature)

    def credit(self, table: Table, micro_batches: Sequence[MicroBatch]) -> list[MicroBatch]:
        """The micro-batches with their advantages."""
        return precompute.credit(table, micro_batches, self.algorithm, self.dist)

    def select_tokens(self, update: Sequence[MicroBatch], step: int, index: int) -> list[MicroBatch]:
        """The micro-batches with the tokens that the update `index` of a step learns from."""
        seed = [self.config.seed, step, index]
        return precompute.select_tokens(
            self.policy, update, self.algorithm, self.temperature, self.dist, seed
        )

    def forward_backward(
        self, name: PolicyName, micro_batches: Sequence[MicroBatch], sums: MetricSums
    ) -> None:
        """Make the gradient of an update: the sum over its micro-batches. `sums` receives metrics."""
        self.optimizers[name].grads.zero_()
        for micro in micro_batches:
            if name == "critic":
                self._critic_pass(micro, sums)
                continue
            release_cached_memory()
            self._policy_pass(micro, sums)
        if name == "policy":
            release_cached_memory()

    def optim_step(self, name: PolicyName) -> float:
        """Sum the gradient over ranks, clip, update. Returns the norm.

        Raises TrainingDiverged if it is not finite.
        """
        return self.optimizers[name].update(self.dist)

    @property
    def average(self) -> dict[str, nn.Parameter]:
        """The teacher's parameters, if they are an average of the policy's; else empty."""
        return role_params(self.policy, TEACHER) if self.config.has_average else {}

    @torch.no_grad()
    def learn(self, metrics: Mapping[str, float]) -> None:
        """Change what the run learns besides its adapter, after a step whose updates stand."""
        self.learned.update(self.algorithm.learn(metrics))
        for average, param in zip(self.average.values(), self.policy.lora.values(), strict=False):
            average.lerp_(param, self.config.algorithm.teacher_update_rate)

    def save(self, run: RunDir, step: int) -> None:
        """Write the checkpoint of `step` unless it exists. Rank 0 writes."""
        if self.dist.is_main:
            optimizers = list(self.optimizers.values())
            save_checkpoint(run, step, self.config, optimizers, self.learned, self.average)

    def publish(self, run_config: RunConfig, version: int, canary: Canary) -> dict[str, float]:
        """Write the policy as `policy-v000012/`, for the engines. Returns metrics. Rank 0 writes.

        `canary`: logprobs by which an engine that has loaded it is verified.
        """
        metrics, started = {"adapter/b_norm": b_norm(self.policy)}, time.monotonic()
        if self.dist.is_main:
            adapter = write_adapter(self.policy, run_config, version, canary)
            metrics["adapter/bytes"] = float(adapter.weights_path.stat().st_size)
            metrics["time/publish_s"] = time.monotonic() - started
        return metrics

    def load(self, checkpoint: Path) -> int:
        """Load the parameters and optimizers of all policies. Returns the checkpoint's step.

        Rank 0 reads. All ranks call it.
        """
        loaded = (list(self.optimizers.values()), self.learned, self.average)
        step = load_checkpoint(checkpoint, *loaded) if self.dist.is_main else 0
        return share_checkpoint(self.dist, step, *loaded)

    def _policy_pass(self, micro: MicroBatch, sums: MetricSums) -> None:
        """A separate function, so that its graph is freed before the next micro-batch."""
        # Only the reference logprobs of one micro-batch are in memory.
        needs_ref = self.algorithm.needs_reference
        ref = precompute.ref_logprobs(self.policy, micro, self.temperature) if needs_ref else None
        teacher, divergences = self._teacher(micro, sums), None
        with lora_dropout(self.policy, active=True):  # also around backward, which may recompute activations
            if teacher is not None and not isinstance(teacher, Tensor):
                logprobs, entropies, divergences, teacher = compare(
                    self.policy, micro.tokens, self.temperature, teacher
                )
            else:
                logprobs, entropies = score(self.policy, micro.tokens, self.temperature)
            inputs = precompute.loss_inputs(micro, logprobs, entropies, ref, teacher, divergences)
            loss, metrics = self.algorithm.loss(inputs)
            loss.backward()  # type: ignore[no-untyped-call]
        sums.add(metrics)
        sums.add_tokens(micro, logprobs.detach(), has_dropout=self.config.lora.dropout > 0)

    def _teacher(self, micro: MicroBatch, sums: MetricSums) -> Tensor | Teacher | None:
        """Its logprobs [C], or what a divergence needs."""
        divergence = self.algorithm.divergence
        if not self.algorithm.needs_teacher:
            return micro.teacher_logprobs if divergence is None else precompute.teacher_top(micro, divergence)
        with sums.teacher_timer.running():
            if divergence is not None:
                return precompute.teacher_states(self.policy, micro, divergence)
            return precompute.teacher_logprobs(self.policy, micro, self.temperature)

    def _critic_pass(self, micro: MicroBatch, sums: MetricSums) -> None:
        """The critic's loss over the same tokens: the mean clipped squared error."""
        assert self.critic is not None
        assert micro.values is not None
        assert micro.returns is not None
        old_values, counted, targets = micro.values, micro.counted, micro.returns
        values = predict_values(self.policy, self.critic, micro.tokens)
        losses = value_loss(values, old_values, targets, self.critic.config.clip)
        loss = (losses * counted).sum() / max(1, micro.size.num_tokens)
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
