"""Numbers that go bad: a step is learned from, or it leaves no trace in the optimizers and its inputs are kept."""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from skylite.config.train import AnomalyConfig
from skylite.errors import TrainingDiverged
from skylite.model.distributed import Dist
from skylite.run.files import atomic_folder, write_json
from skylite.run.rollout_file import mean_reward
from skylite.run.run_dir import RunDir
from skylite.trainer.optimizer import FlatAdamW
from skylite.types import Group, is_number

FINITE_METRICS = (
    "loss/policy",
    "critic/loss",
    "policy/entropy",
    "policy/kl_ref",
    "mismatch/kl",
    "optim/grad_norm",
    "critic/grad_norm",
)
"""Metrics of which none may be infinite or no number."""


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """What a optimizer was before a step: parameters by name, AdamW's state by name."""

    params: dict[str, Tensor]
    moments: dict[str, dict[str, Tensor]]


def take_snapshot(optimizer: FlatAdamW) -> OptimizerSnapshot:
    """A copy of everything that an update changes."""
    moments = {n: optimizer.adamw.state[p] for n, p in optimizer.params.items() if p in optimizer.adamw.state}
    return OptimizerSnapshot(
        {n: p.detach().clone() for n, p in optimizer.params.items()},
        {n: {k: v.clone() for k, v in values.items()} for n, values in moments.items()},
    )


def restore_snapshot(optimizer: FlatAdamW, state: OptimizerSnapshot) -> None:
    """Undo every update since `take_snapshot`."""
    for name, param in optimizer.params.items():
        param.data.copy_(state.params[name])
    optimizer.adamw.state.clear()
    optimizer.adamw.state.update({optimizer.params[n]: dict(values) for n, values in state.moments.items()})
    optimizer.park_moments()


@contextmanager
def snapshots_before_update(optimizers: Sequence[FlatAdamW]) -> Iterator[dict[str, OptimizerSnapshot]]:
    """Within the block, every optimizer's state as it was before its first update, by name.

    It is copied at that update, not at the start of the block: until then the activations of the backward pass take the memory.
    """
    before: dict[str, OptimizerSnapshot] = {}

    def remember(optimizer: FlatAdamW, *_: object) -> None:
        if optimizer.name not in before:
            before[optimizer.name] = take_snapshot(optimizer)

    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.adamw.register_step_pre_hook(partial(remember, optimizer)).remove)
        yield before


def train_or_roll_back(
    optimizers: Sequence[FlatAdamW],
    dist: Dist,
    learn: Callable[[], dict[str, float]],
    find_anomaly: Callable[[Mapping[str, float]], str],
    publish: Callable[[], dict[str, float]],
) -> tuple[dict[str, float], str]:
    """Metrics of `learn` and then `publish`, and why the updates were undone; empty when they stand. All ranks decide alike.

    Bad is what `find_anomaly` names on any rank, and a TrainingDiverged, which every rank raises: gradients are summed before they are
    judged, and the canary is the same everywhere.
    """
    metrics: dict[str, float] = {}
    with snapshots_before_update(optimizers) as before:
        try:
            metrics = learn()
            fault = find_anomaly(metrics)
            if not dist.all_reduce_max_(torch.tensor([float(bool(fault))], device=dist.device)).item():
                return metrics | publish(), ""
        except TrainingDiverged as error:
            fault = error.what
    for optimizer in optimizers:
        if optimizer.name in before:
            restore_snapshot(optimizer, before[optimizer.name])
    return metrics, fault or "another rank found a number that is not finite"


def rollout_anomaly(groups: Sequence[Group]) -> str:
    """The first reward or logprob of a step's rollouts that is not a finite number, in words; "" where there is none."""
    for row, group in enumerate(groups):
        for column, trajectory in enumerate(group.trajectories):
            name = f"trajectory {column} of group {row}"
            if not is_number(trajectory.train_reward):
                return f"the reward of {name} (prompt {group.prompt.id}) is {trajectory.train_reward:g}"
            for turn, sample in enumerate(trajectory.samples):
                for place, logprob in enumerate(sample.rollout_logprobs):
                    if not math.isfinite(logprob):
                        return f"vLLM's logprob of token {place} in turn {turn} of {name} is {logprob}"
    return ""


def metric_anomaly(metrics: Mapping[str, float], anomaly: AnomalyConfig) -> str:
    """Which number of a step is not finite or over its limit, in words."""
    for name in FINITE_METRICS:
        if not math.isfinite(metrics.get(name, 0.0)):
            return f"{name} is {metrics[name]}"
    limits = {
        "policy/kl_ref": ("anomaly.max_kl", anomaly.max_kl),
        "mismatch/kl": ("anomaly.max_mismatch_kl", anomaly.max_mismatch_kl),
    }
    for name, (setting, limit) in limits.items():
        if limit is not None and metrics.get(name, 0.0) > limit:
            return f"{name} is {metrics[name]:.4g}, over {setting}={limit:g}"
    return ""


def reward_collapse(run: RunDir, step: int, anomaly: AnomalyConfig) -> str:
    """Whether the mean reward of each of the last `min_reward_steps` steps was too low, in words."""
    first = step - anomaly.min_reward_steps + 1
    if anomaly.min_reward is None or first < 1:
        return ""
    paths = [run.rollout_path(k) for k in range(first, step + 1)]
    means = [mean_reward(path) for path in paths if path.exists()]
    # A step whose rewards were no numbers (it was skipped) tells nothing of how good the policy is.
    if len(means) < len(paths) or not all(-math.inf < m < anomaly.min_reward for m in means):
        return ""
    return f"the mean reward was under anomaly.min_reward={anomaly.min_reward:g} in steps {first} to {step} (last {means[-1]:.4g})"


def parameter_anomaly(optimizers: Sequence[FlatAdamW]) -> str:
    """Which parameters an update left without numbers, in words."""
    for optimizer in optimizers:
        if bad := [n for n, p in optimizer.params.items() if not bool(torch.isfinite(p).all())]:
            return f"the update left {len(bad)} of the {optimizer.name}'s matrices not finite, first {bad[0]}"
    return ""


def save_rejected_step(
    run: RunDir, step: int, reason: str, metrics: Mapping[str, float], anomaly: AnomalyConfig
) -> Path:
    """Copy what a bad step learned from into `rejected_steps/step-000012`, with the reason. Rank 0 only. Returns the folder."""
    name, number = run.rollout_path(step).stem, 1
    while (path := run.rejected_steps / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    rollouts = run.rollout_path(step)
    with atomic_folder(path, rollouts.stat().st_size) as folder:
        shutil.copyfile(rollouts, folder / "rollouts.parquet")
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        write_json(
            folder / "reason.json",
            {"step": step, "reason": reason, "anomaly": anomaly.model_dump(mode="json"), "metrics": numbers},
        )
    return path


def consecutive_skips(run: RunDir, step: int) -> int:
    """How many steps right before `step` were skipped."""
    count = 0
    while (path := run.trainer_step_path(step - 1 - count)).exists() and "skipped" in run.read_json(path):
        count += 1
    return count
