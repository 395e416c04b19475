"""The trainer's loop: read rollouts, train, publish an adapter. It talks to the parent through files only.

Consumes: the canary and the rollout files of the parent. Waits for: the next rollout file, or a stop request.
Produces: adapters, checkpoints, step files. Unblocks: the parent, which loads and records each version.
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from skylite.adapters.manifest import Canary, CanaryImage
from skylite.config.train import RunConfig, TrainConfig
from skylite.errors import TrainingDiverged
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.lent_weights import LentWeights
from skylite.model.policy import Policy, base_tensors, load_policy, teacher_of
from skylite.model.process_group import Dist, half_the_threads
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.files import write_json
from skylite.run.rollout_file import read_examples
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
    base_canary_logprobs,
    canary_logprobs,
    check_reference,
    has_effects,
    kind_effects,
    sequences_of,
    wait_for_canary,
)
from skylite.trainer.checkpoint import CheckpointInterval
from skylite.trainer.micro_batch_memory import (
    first_line,
    free_memory,
    halve_micro_batches,
    is_out_of_memory,
    lost_to_memory,
    memory_so_far,
    resolve_micro_batch_tokens,
)
from skylite.trainer.optimizer import FlatAdamW
from skylite.trainer.shared_base import SharedBase
from skylite.trainer.step import held_out_metrics, train_step
from skylite.trainer.trainer import Trainer, make_algorithm, make_trainer
from skylite.types import ImageTokens, TrainingExample


@dataclass(frozen=True, slots=True, kw_only=True)
class LoopState:
    """The trainer and its run. `build_state` makes it once."""

    run: RunDir
    run_config: RunConfig
    trainer: Trainer
    canary_sequences: list[list[int]]
    canary_image: ImageTokens | None = None
    base_logprobs: list[list[float]]
    """[S][L - 1] canary logprobs of the base model, which never changes."""
    choices: list[str]
    """A sentence per shortcut: used or not, and why."""
    base_weights: LentWeights | None = None
    """With engine.sleep=weights: those of the base, which leave the device while the engines sample."""
    held_out: list[TrainingExample] = field(default_factory=list)
    """Rows that the trainer scores. Empty: the engine scores the held-out prompts."""

    @property
    def config(self) -> TrainConfig:
        return self.run_config.config

    @property
    def dist(self) -> Dist:
        return self.trainer.dist

    @property
    def policy(self) -> Policy:
        return self.trainer.policy

    @property
    def optimizers(self) -> list[FlatAdamW]:
        return list(self.trainer.optimizers.values())

    def with_run_config(self, run_config: RunConfig) -> LoopState:
        """The same with other micro-batches."""
        return replace(self, run_config=run_config, trainer=replace(self.trainer, config=run_config.config))


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


@dataclass(slots=True)
class Training:
    """A run in training: its state, and how far it is."""

    state: LoopState
    first: int
    """The step that it started after."""
    done: int
    """The last step whose version is published."""
    interval: CheckpointInterval
    printed: int = 0
    """Steps between checkpoints, as last printed."""

    @property
    def is_complete(self) -> bool:
        return self.done >= self.state.config.num_steps


def train(run: RunDir, run_config: RunConfig, dist: Dist, resume: bool) -> None:
    """Publish the first version, then train on each rollout file until the last step or a stop request."""
    training = begin_training(run, run_config, dist, resume)
    while not training.is_complete:
        waited = time.monotonic()
        examples = wait_for_examples(training.state, training.done + 1)
        if examples is None:
            break
        take_step(training, examples, waited)
    end_training(training)


def begin_training(
    run: RunDir, run_config: RunConfig, dist: Dist, resume: bool, base: SharedBase | None = None
) -> Training:
    """Prepare the policy, or load the newest checkpoint, and publish its version. All ranks call it.

    `base`: of several runs, which the policy joins under the name of the run's folder.
    """
    with half_the_threads():  # the engine starts at the same time
        state = build_state(run, run_config, dist, base)
    done = restore(state) if resume else 0
    started = time.monotonic()
    metrics = publish_version(state, done) | score_held_out(state, done)
    facts = {"resumed": done > 0, "choices": state.choices}
    give_memory_back(state)
    write_step_file(run, dist, done, common_facts(state) | facts, metrics, (started, started))
    return Training(state, done, done, CheckpointInterval(state.config.checkpoint.every))


def take_step(training: Training, examples: list[TrainingExample], waited: float) -> None:
    """Train the next step and publish its version. All ranks call it.

    `waited`: since when, by the monotonic clock, the trainer had nothing else to do. Raises TrainingDiverged.
    """
    step, interval = training.done + 1, training.interval
    copies_s = take_memory(training.state)
    training.state, result = try_until_it_fits(training.state, examples, step)
    state = training.state
    run, dist = state.run, state.dist
    metrics = result.metrics | {
        "time/wait_s": result.span[0] - waited,
        "time/train_s": result.span[1] - result.span[0],
    }
    if result.anomaly:
        save = partial(checkpoint_step, state, step - 1)
        reason, hint = result.anomaly, result.hint
        metrics |= reject_step(run, state.config, dist, step, reason, metrics, save, hint)
        metrics |= publish_version(state, step)
    training.done = step
    metrics |= score_held_out(state, step)
    # The first step also waits for the engine's start and the first evaluation.
    interval.step_ended(time.monotonic() - waited if step > training.first + 1 else None)
    notes: list[str] = []
    if is_checkpointed(state, interval, step):
        metrics |= checkpoint_step(state, step)
        interval.written(metrics["time/checkpoint_s"])
    is_news = interval.is_measured and not training.printed / 2 < interval.steps < 2 * training.printed
    if interval.every is None and is_news:
        notes, training.printed = [str(interval)], interval.steps
    metrics["checkpoint/interval"] = float(interval.steps)
    facts = {"skipped": result.anomaly} if result.anomaly else {}
    facts |= common_facts(state) | {"warnings": result.warnings, "notes": notes, **result.facts}
    copies_s += give_memory_back(state)
    if state.base_weights is not None:
        metrics["time/base_copies_s"] = copies_s
    write_step_file(run, dist, step, facts, metrics, result.span)


def end_training(training: Training) -> None:
    """Write the checkpoint of the last step. All ranks call it."""
    checkpoint_step(training.state, training.done)


def is_checkpointed(state: LoopState, interval: CheckpointInterval, step: int) -> bool:
    """Whether a step that has just ended gets a checkpoint. All ranks call it, and rank 0 decides."""
    config = state.config
    is_scored = bool(config.checkpoint.keep_best and config.eval.every and step % config.eval.every == 0)
    is_due = step == config.num_steps or is_scored or interval.is_due(step)
    return bool(state.dist.broadcast_(torch.tensor([float(is_due)], device=state.dist.device)).item())


def build_state(run: RunDir, run_config: RunConfig, dist: Dist, base: SharedBase | None = None) -> LoopState:
    """Load and shard the model, choose its shortcuts, and score the canary with the base model.

    With `base`, add the policy to it instead.
    """
    config = run_config.config
    algorithm = make_algorithm(config)
    algorithm.load(run_config.resolved.trust.programs)  # before the model: a broken file ends the run here
    if base is None:
        policy = load_policy(run_config.resolved, config, dist)
        sequences, image = wait_for_canary(run, dist)
        policy, choices = enable_shortcuts(policy, max(sequences, key=len))
    else:
        sequences, image = wait_for_canary(run, dist)
        resolved = run_config.resolved
        start = resolved.identity.warm_start
        policy = base.add_policy(run.root.name, config, start, teacher_of(resolved)).policy
        choices = base.choices
    run_config = resolve_micro_batch_tokens(run, run_config, policy, dist)
    config = run_config.config
    if algorithm.needs_reference or algorithm.penalises_kl:
        must_agree = not config.pulls_to_base
        kl = check_reference(policy, sequences, must_agree, image)
        if dist.is_main:
            print(f"KL to the reference at the start: {kl:.3g}", flush=True)
    return LoopState(
        run=run,
        run_config=run_config,
        trainer=make_trainer(policy, config, dist)
        if base is None
        else replace(base.trainers[run.root.name], config=config),
        canary_sequences=sequences,
        canary_image=image,
        base_logprobs=base_canary_logprobs(policy, sequences, image),
        base_weights=lent_weights(policy, config, dist),
        choices=choices,
        held_out=read_held_out(run, dist),
    )


def lent_weights(policy: Policy, config: TrainConfig, dist: Dist) -> LentWeights | None:
    """The base's, with engine.sleep=weights."""
    if config.engine.lends != "weights":
        return None
    weights = LentWeights(base_tensors(policy), dist.device)
    if dist.is_main:
        size = f"{weights.num_bytes / 2**20:.1f} MiB"
        print(f"engine.sleep=weights: {size} of the base leave the device while engines sample", flush=True)
    return weights


def restore(state: LoopState) -> int:
    """Load the newest checkpoint. Returns its step, or 0 if there is no checkpoint yet.

    Rank 0 chooses and reads it for all: another machine may see the folder as it was a minute ago.
    """
    steps = state.dist.share(checkpoint_steps(state.run) if state.dist.is_main else None)
    if not steps:
        return 0
    return state.trainer.load(state.run.checkpoint_path(steps[-1]))


def wait_for_examples(state: LoopState, step: int) -> list[TrainingExample] | None:
    """The examples of `step` once their file exists, or None on a stop request. Rank 0 reads them for all."""
    run, takes_turns = state.run, state.config.engine.lends is not None
    path, stop = run.rollout_path(step), run.stop_path

    def look() -> list[TrainingExample] | None:
        if stop.exists():
            return []
        if takes_turns and not is_its_turn(run, step):
            return None
        return read_examples(path) if path.exists() else None

    return state.dist.wait_for(look) or None


def is_its_turn(run: RunDir, step: int) -> bool:
    """Whether the engines sleep, so that the trainer may compute `step` in the memory that they lend."""
    path = run.trainer_turn_path
    return path.exists() and run.read_count(path, "step") >= step


def take_memory(state: LoopState) -> float:
    """Bring the base back into what the engines lend. Returns the seconds."""
    started = time.monotonic()
    if state.base_weights is not None:
        state.base_weights.come_back()
    return time.monotonic() - started


def give_memory_back(state: LoopState) -> float:
    """Free what the engines lent. Returns the seconds.

    Call it before the step file, at which they take it again: to write that, each rank waits for the others.
    """
    started = time.monotonic()
    if state.base_weights is not None:
        state.base_weights.leave()
    if state.config.engine.lends is not None:
        free_memory()
    return time.monotonic() - started


def read_held_out(run: RunDir, dist: Dist) -> list[TrainingExample]:
    """The held-out rows, written before the canary. Rank 0 reads them for all."""
    is_here = dist.is_main and run.held_out_path.exists()
    return dist.share(read_examples(run.held_out_path) if is_here else [])


def try_until_it_fits(
    state: LoopState, examples: list[TrainingExample], step: int
) -> tuple[LoopState, StepResult]:
    """`try_step`, again with smaller micro-batches while it runs out of memory.

    Returns the state with the micro-batches that fitted. Raises OutOfMemory if there are several ranks, and
    RunFailed if no micro-batch is small enough.
    """
    warnings: list[str] = []
    while True:
        try:
            result = try_step(state, examples, step)
            return state, replace(result, warnings=tuple(warnings))
        except Exception as error:
            if not is_out_of_memory(error):
                raise
            reason = first_line(error)
        # Outside the handler, because the error holds the frames, and so the tensors, of the attempt.
        run_config = halve_micro_batches(state.run, state.run_config, step, reason)
        if state.dist.dp_size > 1:
            raise lost_to_memory(run_config, step, reason)
        state = state.with_run_config(run_config)
        warnings.append(
            f"step {step} ran out of memory ({reason}); it was computed again, and the run continues, with "
            f"trainer.tokens_per_micro_batch={run_config.config.trainer.tokens_per_micro_batch}"
        )


def try_step(state: LoopState, examples: list[TrainingExample], step: int) -> StepResult:
    """Train a step and publish its version. After an anomaly, neither happened: all updates are undone."""
    config, started = state.config.anomaly, time.monotonic()
    collapsed = reward_collapse(state.run, step, config) if state.dist.is_main else None
    if anomaly := rollout_anomaly(examples) or state.dist.share(collapsed):
        return StepResult({}, anomaly, (started, started))
    ended, facts = started, dict[str, Any]()

    def compute() -> dict[str, float]:
        nonlocal ended
        metrics = train_step(state.trainer, examples, step, facts)
        ended = time.monotonic()
        return metrics

    def find_anomaly(metrics: Mapping[str, float]) -> str:
        return metric_anomaly(metrics, config) or parameter_anomaly(state.optimizers)

    metrics, anomaly, hint = train_or_roll_back(
        state.optimizers, state.dist, compute, find_anomaly, lambda: publish_version(state, step)
    )
    if not anomaly:
        state.trainer.learn(metrics)
    return StepResult(metrics, anomaly, (started, ended), hint, facts=facts)


def publish_version(state: LoopState, version: int) -> dict[str, float]:
    """Score the canary, then publish. Returns metrics. All ranks call it.

    Raises TrainingDiverged on every rank, and publishes nothing, if the policy's logprobs are not finite.
    """
    started = time.monotonic()
    canary = score_canary(state, version)
    canary_s = time.monotonic() - started
    metrics = state.trainer.publish(state.run_config, version, canary)
    total_s = time.monotonic() - started
    return metrics | {"time/canary_s": canary_s, "time/publish_and_canary_s": total_s}


def score_held_out(state: LoopState, version: int) -> dict[str, float]:
    """Metrics of the held-out rows, if the version is scored on them. All ranks call it."""
    config, started = state.config, time.monotonic()
    is_between = config.eval.every > 0 and version % config.eval.every == 0
    if not state.held_out or not (is_between or version in (0, config.num_steps)):
        return {}
    metrics = held_out_metrics(state.trainer, state.held_out)
    return metrics | {"time/eval_s": time.monotonic() - started}


def score_canary(state: LoopState, version: int) -> Canary:
    """The canary's logprobs with the current adapter. All ranks call it.

    Raises TrainingDiverged on all ranks or on none, because every rank scores the same tokens.
    """
    chosen = sequences_of(version, len(state.canary_sequences))
    sequences, image = [state.canary_sequences[index] for index in chosen], state.canary_image
    logprobs = canary_logprobs(state.policy, sequences, image)
    if not all(math.isfinite(x) for row in logprobs for x in row):
        raise TrainingDiverged(f"the logprobs of {adapter_name(version)} on the canary are not finite", "")
    has = has_effects(version, state.policy.dtype)
    return Canary(
        sequences=sequences,
        policy_logprobs=logprobs,
        base_logprobs=[state.base_logprobs[index] for index in chosen],
        effects=kind_effects(state.policy, sequences, logprobs, image) if has else {},
        image=None if image is None else CanaryImage.of(image),
    )


def checkpoint_step(state: LoopState, step: int) -> dict[str, float]:
    """Write the checkpoint of `step` unless it exists. Returns metrics.

    Rank 0 writes. All ranks call it.
    """
    started = time.monotonic()
    state.trainer.save(state.run, step)
    return {"time/checkpoint_s": time.monotonic() - started}


def common_facts(state: LoopState) -> dict[str, Any]:
    """Facts in every step file. A replay needs the micro-batches: their number affects rounding."""
    tokens = state.config.trainer.tokens_per_micro_batch
    return {"packing": state.policy.packing, "tokens_per_micro_batch": tokens}


def write_step_file(
    run: RunDir,
    dist: Dist,
    step: int,
    facts: Mapping[str, Any],
    metrics: Mapping[str, float],
    trained: tuple[float, float],
) -> None:
    """Write the report on rank 0, with the largest memory of any rank. All ranks call it."""
    own = memory_so_far(dist.device)
    largest = torch.tensor(list(own.values()), device=dist.device, dtype=torch.float64)
    memory = dict(zip(own, dist.all_reduce_max_(largest).tolist(), strict=True))
    if dist.is_main:
        body = {
            "step": step,
            "version": step,
            **facts,
            "trained": trained,
            "metrics": {**metrics, **memory},
        }
        write_json(run.trainer_step_path(step), body)
