"""The trainer's loop: read rollouts, train, publish an adapter. It talks to the parent through files only."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from skylite.adapters.manifest import Canary
from skylite.config.train import RunConfig, TrainConfig
from skylite.errors import TrainingDiverged
from skylite.model.checked_shortcuts import enable_shortcuts
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist, half_the_threads
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir, adapter_name
from skylite.trainer.anomaly import (
    metric_anomaly,
    parameter_anomaly,
    reject_step,
    reward_collapse,
    rollout_anomaly,
    train_or_roll_back,
)
from skylite.trainer.canary import (
    POLL_S,
    base_canary_logprobs,
    canary_logprobs,
    check_reference,
    sequences_of,
    wait_for_canary,
)
from skylite.trainer.checkpoint import load_checkpoint, random_states, save_checkpoint
from skylite.trainer.checkpoint_interval import CheckpointInterval
from skylite.trainer.chosen_algorithm import load_functions
from skylite.trainer.critic import Critic, make_critic
from skylite.trainer.micro_batch_memory import resolve_micro_batch_tokens
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from skylite.trainer.out_of_memory import (
    first_line,
    halve_micro_batches,
    is_out_of_memory,
    lost_to_memory,
)
from skylite.trainer.publish_adapter import b_norm, publish
from skylite.trainer.step import train_step
from skylite.trainer.step_report import write_step_file
from skylite.types import Group


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Everything a step needs. `build_trainer` makes it once."""

    run: RunDir
    run_config: RunConfig
    dist: Dist
    policy: Policy
    optimizer: FlatAdamW
    critic: Critic | None
    canary_sequences: list[list[int]]
    base_logprobs: list[list[float]]
    """[S][L - 1] canary logprobs of the base model, which never changes."""
    choices: list[str]
    """A sentence per shortcut: used or not, and why."""

    @property
    def config(self) -> TrainConfig:
        return self.run_config.config

    @property
    def optimizers(self) -> list[FlatAdamW]:
        return [self.optimizer, *([self.critic.optimizer] if self.critic else [])]


@dataclass(frozen=True, slots=True)
class StepResult:
    """The outcome of one attempt to train a step."""

    metrics: dict[str, float]
    anomaly: str
    """The reason why the step was rolled back; empty if its updates stand and its version is published."""
    span: tuple[float, float]
    """Start and end of the computation, in seconds of the monotonic clock."""
    hint: str = ""
    """What to do about the anomaly, if the rule that found it knows better than `reject_step`."""
    warnings: tuple[str, ...] = ()
    """Sentences for the user."""
    facts: Mapping[str, Any] = field(default_factory=dict)
    """What the step file holds besides metrics."""


def train(run: RunDir, run_config: RunConfig, dist: Dist, resume: bool) -> None:
    """Publish the first version, then train on each rollout file until the last step or a stop request."""
    with half_the_threads():  # the engine starts at the same time
        trainer = build_trainer(run, run_config, dist)
    interval, printed = CheckpointInterval(trainer.config.checkpoint.every), 0
    first = done = restore(trainer) if resume else 0
    started = time.monotonic()
    metrics = publish_version(trainer, done)
    facts = {"resumed": done > 0, "choices": trainer.choices}
    write_step_file(run, dist, done, common_facts(trainer) | facts, metrics, (started, started))
    for step in range(done + 1, trainer.config.num_steps + 1):
        waited = time.monotonic()
        groups = wait_for_rollouts(trainer, step)
        if groups is None:
            break
        trainer, result = try_until_it_fits(trainer, groups, step)
        metrics = result.metrics | {
            "time/wait_s": result.span[0] - waited,
            "time/train_s": result.span[1] - result.span[0],
        }
        if result.anomaly:
            save = partial(checkpoint_step, trainer, step - 1)
            reason, hint = result.anomaly, result.hint
            metrics |= reject_step(run, trainer.config, dist, step, reason, metrics, save, hint)
            metrics |= publish_version(trainer, step)
        done = step
        # The first step also waits for the engine's start and the first evaluation.
        interval.step_ended(time.monotonic() - waited if step > first + 1 else None)
        notes: list[str] = []
        if is_checkpointed(trainer, interval, step):
            metrics |= checkpoint_step(trainer, step)
            interval.written(metrics["time/checkpoint_s"])
        is_news = interval.is_measured and not printed / 2 < interval.steps < 2 * printed
        if interval.every is None and is_news:
            notes, printed = [str(interval)], interval.steps
        metrics["checkpoint/interval"] = float(interval.steps)
        facts = {"skipped": result.anomaly} if result.anomaly else {}
        facts |= common_facts(trainer) | {"warnings": result.warnings, "notes": notes, **result.facts}
        write_step_file(run, dist, step, facts, metrics, result.span)
    checkpoint_step(trainer, done)


def is_checkpointed(trainer: Trainer, interval: CheckpointInterval, step: int) -> bool:
    """Whether a step that has just ended gets a checkpoint. All ranks call it, and rank 0 decides."""
    config = trainer.config
    is_scored = bool(config.checkpoint.keep_best and config.eval.every and step % config.eval.every == 0)
    is_due = step == config.num_steps or is_scored or interval.is_due(step)
    return bool(trainer.dist.broadcast_(torch.tensor([float(is_due)], device=trainer.dist.device)).item())


def build_trainer(run: RunDir, run_config: RunConfig, dist: Dist) -> Trainer:
    """Load and shard the model, choose its shortcuts, and score the canary with the base model."""
    config = run_config.config
    load_functions(config.algorithm, run_config.resolved.programs)
    policy = load_policy(run_config.resolved, config, dist)
    sequences = wait_for_canary(run)
    policy, choices = enable_shortcuts(policy, max(sequences, key=len))
    run_config = resolve_micro_batch_tokens(run, run_config, policy, dist)
    config = run_config.config
    if config.algorithm.uses_ref:
        must_agree = config.algorithm.kl_ref == "init" or config.lora.from_adapter is None
        kl = check_reference(policy, sequences, must_agree)
        if dist.is_main:
            print(f"KL to the reference at the start: {kl:.3g}", flush=True)
    optim = config.optim
    return Trainer(
        run=run,
        run_config=run_config,
        dist=dist,
        policy=policy,
        optimizer=make_optimizer(
            "policy",
            policy.lora,
            optim.lr,
            optim.max_grad_norm,
            optim,
            optim.lora_plus_ratio,
            config.trainer.offload,
        ),
        critic=make_critic(policy, config, dist) if config.algorithm.uses_critic else None,
        canary_sequences=sequences,
        base_logprobs=base_canary_logprobs(policy, sequences),
        choices=choices,
    )


def restore(trainer: Trainer) -> int:
    """Load the newest checkpoint. Returns its step, or 0 if there is no checkpoint yet."""
    steps = checkpoint_steps(trainer.run)
    if not steps:
        return 0
    return load_checkpoint(trainer.run.checkpoint_path(steps[-1]), trainer.optimizers, trainer.dist)


def wait_for_rollouts(trainer: Trainer, step: int) -> list[Group] | None:
    """The groups of `step` once their file exists, or None on a stop request.

    Every rank polls the disk, because a long wait in a collective would time out. Ranks may see different
    files first, so all follow rank 0.
    """
    path, stop = trainer.run.rollout_path(step), trainer.run.stop_path
    while not (path.exists() or stop.exists()):
        time.sleep(POLL_S)
    stopping = torch.tensor([float(stop.exists())], device=trainer.dist.device)
    return None if trainer.dist.broadcast_(stopping).item() else read_rollouts(path)


def try_until_it_fits(trainer: Trainer, groups: list[Group], step: int) -> tuple[Trainer, StepResult]:
    """`try_step`, again with smaller micro-batches while it runs out of memory.

    Returns the trainer with the micro-batches that fitted. Raises OutOfMemory if there are several ranks, and
    RunFailed if no micro-batch is small enough.
    """
    warnings: list[str] = []
    while True:
        try:
            result = try_step(trainer, groups, step)
            return trainer, replace(result, warnings=tuple(warnings))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        # Outside the handler, because the error holds the frames, and so the tensors, of the attempt.
        run_config = halve_micro_batches(trainer.run, trainer.run_config, step, reason)
        if trainer.dist.dp_size > 1:
            raise lost_to_memory(run_config, step, reason)
        trainer = replace(trainer, run_config=run_config)
        warnings.append(
            f"step {step} ran out of memory ({reason}); it was computed again, and the run continues, with "
            f"trainer.tokens_per_micro_batch={run_config.config.trainer.tokens_per_micro_batch}"
        )


def try_step(trainer: Trainer, groups: list[Group], step: int) -> StepResult:
    """Train a step and publish its version. After an anomaly, neither happened: all updates are undone."""
    config, started = trainer.config.anomaly, time.monotonic()
    if anomaly := rollout_anomaly(groups) or reward_collapse(trainer.run, step, config):
        return StepResult({}, anomaly, (started, started))
    ended, facts = started, dict[str, Any]()

    def compute() -> dict[str, float]:
        nonlocal ended
        metrics = train_step(
            trainer.policy,
            trainer.optimizer,
            groups,
            step,
            trainer.config,
            trainer.dist,
            trainer.critic,
            facts,
        )
        ended = time.monotonic()
        return metrics

    def find_anomaly(metrics: Mapping[str, float]) -> str:
        return metric_anomaly(metrics, config) or parameter_anomaly(trainer.optimizers)

    metrics, anomaly, hint = train_or_roll_back(
        trainer.optimizers, trainer.dist, compute, find_anomaly, lambda: publish_version(trainer, step)
    )
    return StepResult(metrics, anomaly, (started, ended), hint, facts=facts)


def publish_version(trainer: Trainer, version: int) -> dict[str, float]:
    """Score the canary on all ranks, then let rank 0 write the adapter. Returns metrics.

    Raises TrainingDiverged on every rank, and publishes nothing, if the policy's logprobs are not finite.
    """
    started = time.monotonic()
    metrics = {"adapter/b_norm": b_norm(trainer.policy)}
    canary = score_canary(trainer, version)
    metrics["time/canary_s"] = time.monotonic() - started
    if trainer.dist.is_main:
        published = publish(trainer.policy, trainer.run_config, version, canary)
        metrics |= {"adapter/bytes": float(published.num_bytes), "time/publish_s": published.seconds}
    return metrics | {"time/publish_and_canary_s": time.monotonic() - started}


def score_canary(trainer: Trainer, version: int) -> Canary:
    """The canary's logprobs with the current adapter. All ranks call it.

    Raises TrainingDiverged on all ranks or on none, because every rank scores the same tokens.
    """
    chosen = sequences_of(version, len(trainer.canary_sequences))
    sequences = [trainer.canary_sequences[index] for index in chosen]
    logprobs = canary_logprobs(trainer.policy, sequences)
    if not all(math.isfinite(x) for row in logprobs for x in row):
        raise TrainingDiverged(f"the logprobs of {adapter_name(version)} on the canary are not finite", "")
    base_logprobs = [trainer.base_logprobs[index] for index in chosen]
    return Canary(sequences=sequences, policy_logprobs=logprobs, base_logprobs=base_logprobs)


def checkpoint_step(trainer: Trainer, step: int) -> dict[str, float]:
    """Write the checkpoint of `step` unless it exists. Returns metrics.

    Rank 0 writes, with the random state of every rank. All ranks call it.
    """
    started = time.monotonic()
    random_state = random_states(trainer.dist)
    if trainer.dist.is_main:
        save_checkpoint(trainer.run, step, trainer.config, trainer.optimizers, random_state)
    return {"time/checkpoint_s": time.monotonic() - started}


def common_facts(trainer: Trainer) -> dict[str, Any]:
    """Facts in every step file. A replay needs the micro-batches: their number affects rounding."""
    tokens = trainer.config.trainer.tokens_per_micro_batch
    return {"packing": trainer.policy.packing, "tokens_per_micro_batch": tokens}
