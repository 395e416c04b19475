"""The trainer's loop: rollouts in, adapter versions out, joined with the rest of the run by files alone."""

from __future__ import annotations

import math
import resource
import time
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from skylite.adapters.manifest import Canary
from skylite.config.train import RunConfig, TrainConfig
from skylite.errors import TrainingDiverged
from skylite.model.distributed import Dist, half_the_threads
from skylite.model.policy import Policy, load_policy
from skylite.model.probing import enable_fast_paths
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.files import write_json
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir, adapter_name
from skylite.trainer.anomaly import (
    consecutive_skips,
    metric_anomaly,
    parameter_anomaly,
    reward_collapse,
    rollout_anomaly,
    save_rejected_step,
    train_or_roll_back,
)
from skylite.trainer.checkpoint import load_checkpoint, random_states, save_checkpoint
from skylite.trainer.critic import Critic, make_critic
from skylite.trainer.memory import resolve_micro_batch_tokens
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from skylite.trainer.publish import b_norm, base_canary_logprobs, canary_logprobs, check_reference, publish
from skylite.trainer.step import train_step
from skylite.types import Group

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Trainer:
    """Everything a step needs; built once by `start`."""

    run: RunDir
    run_config: RunConfig
    dist: Dist
    policy: Policy
    optimizer: FlatAdamW
    critic: Critic | None
    canary_sequences: list[list[int]]
    base_logprobs: list[list[float]]
    """The canary with the adapter off; the base never changes."""

    @property
    def config(self) -> TrainConfig:
        return self.run_config.config

    @property
    def optimizers(self) -> list[FlatAdamW]:
        return [self.optimizer, *([self.critic.optimizer] if self.critic else [])]


@dataclass(frozen=True, slots=True)
class StepResult:
    """A step that was tried."""

    metrics: dict[str, float]
    fault: str
    """What was bad about it, in words; empty: its updates stand and its version is published."""
    span: tuple[float, float]
    """When it was computed, in seconds of the monotonic clock."""


def train(run: RunDir, run_config: RunConfig, dist: Dist, resume: bool) -> None:
    """Publish the first version, then learn from every rollout file as it appears, until the last step or a stop request."""
    with half_the_threads():
        trainer = start(run, run_config, dist)
    checkpoint = trainer.config.checkpoint
    done = restore(trainer) if resume else 0
    started = time.monotonic()
    record(
        trainer, done, {"resumed": True} if done else {}, publish_version(trainer, done), (started, started)
    )
    for step in range(done + 1, trainer.config.num_steps + 1):
        waited = time.monotonic()
        groups = wait_for_rollouts(trainer, step)
        if groups is None:
            break
        learned = try_step(trainer, groups, step)
        metrics = learned.metrics | {
            "time/wait_s": learned.span[0] - waited,
            "time/train_s": learned.span[1] - learned.span[0],
        }
        if learned.fault:
            metrics |= handle_anomaly(trainer, step, learned.fault, metrics)
            metrics |= publish_version(trainer, step)
        done = step
        if step % checkpoint.every == 0 or step == trainer.config.num_steps:
            metrics |= checkpoint_step(trainer, step)
        record(trainer, step, {"skipped": learned.fault} if learned.fault else {}, metrics, learned.span)
    checkpoint_step(trainer, done)


def start(run: RunDir, run_config: RunConfig, dist: Dist) -> Trainer:
    """Load and shard the model, choose how samples are packed, score the canary with the base."""
    config = run_config.config
    policy = load_policy(run_config.resolved, config, dist)
    sequences = wait_for_canary(run)
    policy, reasons = enable_fast_paths(policy, max(sequences, key=len))
    if dist.is_main:
        print("\n".join(reasons), flush=True)
    run_config = resolve_micro_batch_tokens(run, run_config, policy, dist)
    config = run_config.config
    if config.algorithm.uses_ref:
        found = check_reference(
            policy,
            sequences,
            must_agree=config.algorithm.kl_ref == "init" or config.lora.from_adapter is None,
        )
        if dist.is_main:
            print(f"KL to the reference at the start: {found:.3g}", flush=True)
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
    )


def wait_for_canary(run: RunDir) -> list[list[int]]:
    """The token sequences; the parent's tokenizer may still be loading."""
    while not run.canary_path.exists():
        time.sleep(POLL_S)
    sequences: list[list[int]] = run.read_json(run.canary_path)["sequences"]
    return sequences


def restore(trainer: Trainer) -> int:
    """Go back to the newest checkpoint; its step, or 0 when there is none yet."""
    steps = checkpoint_steps(trainer.run)
    return (
        load_checkpoint(trainer.run.checkpoint_path(steps[-1]), trainer.optimizers, trainer.dist)
        if steps
        else 0
    )


def wait_for_rollouts(trainer: Trainer, step: int) -> list[Group] | None:
    """The groups of `step` once their file is there, or None on a stop request.

    Every rank looks at the disk for itself, because waiting in a collective would run into its timeout; what was seen first can
    differ between ranks, so rank 0's answer counts.
    """
    path, stop = trainer.run.rollout_path(step), trainer.run.stop_path
    while not (path.exists() or stop.exists()):
        time.sleep(POLL_S)
    stopping = torch.tensor([float(stop.exists())], device=trainer.dist.device)
    return None if trainer.dist.broadcast_(stopping).item() else read_rollouts(path)


def try_step(trainer: Trainer, groups: list[Group], step: int) -> StepResult:
    """Learn from a step and publish its version, or neither: when something is bad, the optimizers are as before."""
    rules, started = trainer.config.anomaly, time.monotonic()
    if fault := rollout_anomaly(groups) or reward_collapse(trainer.run, step, rules):
        return StepResult({}, fault, (started, started))
    ended = started

    def learn() -> dict[str, float]:
        nonlocal ended
        metrics = train_step(
            trainer.policy, trainer.optimizer, groups, step, trainer.config, trainer.dist, trainer.critic
        )
        ended = time.monotonic()
        return metrics

    def find_anomaly(metrics: Mapping[str, float]) -> str:
        return metric_anomaly(metrics, rules) or parameter_anomaly(trainer.optimizers)

    metrics, fault = train_or_roll_back(
        trainer.optimizers, trainer.dist, learn, find_anomaly, lambda: publish_version(trainer, step)
    )
    return StepResult(metrics, fault, (started, ended))


def handle_anomaly(trainer: Trainer, step: int, fault: str, metrics: dict[str, float]) -> dict[str, float]:
    """Keep the inputs of a bad step, then go on (returns what metrics it still has) or raise TrainingDiverged, as configured."""
    run, rules, dist = trainer.run, trainer.config.anomaly, trainer.dist
    if dist.is_main:
        save_rejected_step(run, step, fault, metrics, rules)
    skipped = consecutive_skips(run, step)
    if rules.action == "stop" or skipped >= rules.max_skips:
        checkpoint_step(trainer, step - 1)
        dist.all_reduce_sum_(
            torch.zeros(1, device=dist.device)
        )  # rank 0 has written: the first rank to fail ends all others
        also = f", and {skipped} steps before it were skipped" if skipped else ""
        raise TrainingDiverged(
            f"Step {step} went bad: {fault}{also}. The update was not applied; what it learned from is in {run.rejected_steps}.",
            "Correct the reward where it gave no number. Go on with --resume, with --set anomaly.action=skip to leave such steps out, or "
            "begin anew from its last adapter "
            f"(--from-adapter) with a lower optim.lr (now {trainer.config.optim.lr:g}).",
        )
    return {name: metrics.get(name, math.nan) for name in ("policy/entropy", "mismatch/logprob_diff_mean")}


def publish_version(trainer: Trainer, version: int) -> dict[str, float]:
    """Score the canary (all ranks) and write the adapter (rank 0). Returns metrics.

    Raises TrainingDiverged on every rank, with nothing published, when the policy's logprobs are not finite.
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
    """The canary under the adapter as it is. All ranks call it; raises TrainingDiverged on all of them."""
    logprobs = canary_logprobs(trainer.policy, trainer.canary_sequences)
    if not all(math.isfinite(x) for row in logprobs for x in row):
        raise TrainingDiverged(f"the logprobs of {adapter_name(version)} on the canary are not finite", "")
    return Canary(
        sequences=trainer.canary_sequences, policy_logprobs=logprobs, base_logprobs=trainer.base_logprobs
    )


def checkpoint_step(trainer: Trainer, step: int) -> dict[str, float]:
    """Write the checkpoint of `step` unless it is there (rank 0, with every rank's random state). Returns metrics."""
    started = time.monotonic()
    random_state = random_states(trainer.dist)
    if trainer.dist.is_main:
        save_checkpoint(trainer.run, step, trainer.config, trainer.optimizers, random_state)
    return {"time/checkpoint_s": time.monotonic() - started}


def record(
    trainer: Trainer,
    step: int,
    facts: dict[str, bool | str],
    metrics: dict[str, float],
    trained: tuple[float, float],
) -> None:
    """Tell the parent, last of all: whoever sees this file finds the adapter complete.

    `trained`: when the step was computed, in seconds of the monotonic clock, which is the same for all processes of a machine.
    """
    peak = torch.tensor([peak_rss_bytes()], device=trainer.dist.device, dtype=torch.float64)
    peak_bytes = float(trainer.dist.all_reduce_max_(peak).item())
    if trainer.dist.is_main:
        facts = facts | {"packing": trainer.policy.packing}
        body = {
            "step": step,
            "version": step,
            **facts,
            "trained": trained,
            "metrics": metrics | {"mem/rss_peak_bytes": peak_bytes},
        }
        write_json(trainer.run.trainer_step_path(step), body)


def peak_rss_bytes() -> float:
    """Largest resident memory of this process so far (getrusage counts KiB on Linux)."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024.0
