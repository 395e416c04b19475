"""Anomalies: find bad numbers in a step, roll its updates back, save its inputs, and skip it or stop.

NaN is caught here (rewards, sampling logprobs, metrics, parameters) and, as TrainingDiverged, in optimizer.py
(gradients) and trainer/loop.py (canary). A user's loss or advantage that makes NaN ends the run in
algorithms/user_functions.py, which names the function.
"""

from __future__ import annotations

import math
import shutil
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from skylite.config.rollout import GREEDY
from skylite.config.train import AnomalyConfig, TrainConfig
from skylite.errors import TrainingDiverged
from skylite.model.process_group import Dist
from skylite.run.files import atomic_folder, write_json
from skylite.run.rollout_file import mean_reward
from skylite.run.run_dir import RunDir
from skylite.trainer.optimizer import FlatAdamW, restart_hint
from skylite.types import TrainingExample, is_number

FINITE_METRICS = (
    "loss/policy",
    "critic/loss",
    "policy/entropy",
    "policy/kl_ref",
    "mismatch/kl",
    "optim/grad_norm",
    "critic/grad_norm",
)
"""Metrics that must be finite."""


@dataclass(frozen=True, slots=True)
class OptimizerSnapshot:
    """A copy of everything that an update changes."""

    params: dict[str, Tensor]
    """By parameter name."""
    moments: dict[str, dict[str, Tensor]]
    """AdamW's state by parameter name."""


def take_snapshot(optimizer: FlatAdamW) -> OptimizerSnapshot:
    """Copy the parameters and AdamW's state."""
    moments = {n: optimizer.adamw.state[p] for n, p in optimizer.params.items() if p in optimizer.adamw.state}
    tensors = [p.detach() for p in optimizer.params.values()]
    tensors += [v for values in moments.values() for v in values.values()]
    copies = [torch.empty_like(t) for t in tensors]
    torch._foreach_copy_(copies, tensors)
    copy = iter(copies)
    return OptimizerSnapshot(
        {n: next(copy) for n in optimizer.params},
        {n: {k: next(copy) for k in values} for n, values in moments.items()},
    )


def restore_snapshot(optimizer: FlatAdamW, snapshot: OptimizerSnapshot) -> None:
    """Undo every update since `take_snapshot`."""
    for name, param in optimizer.params.items():
        param.data.copy_(snapshot.params[name])
    optimizer.adamw.state.clear()
    optimizer.adamw.state.update(
        {optimizer.params[n]: dict(values) for n, values in snapshot.moments.items()}
    )
    optimizer.offload_moments()


@contextmanager
def snapshots_before_update(optimizers: Sequence[FlatAdamW]) -> Iterator[dict[str, OptimizerSnapshot]]:
    """Yield a dict that receives each optimizer's snapshot, by name, right before its first update.

    A snapshot at the start of the block would add to the peak memory of the backward pass.
    """
    snapshots: dict[str, OptimizerSnapshot] = {}

    def keep_first(optimizer: FlatAdamW, *_: object) -> None:
        if optimizer.name not in snapshots:
            snapshots[optimizer.name] = take_snapshot(optimizer)

    with ExitStack() as stack:
        for optimizer in optimizers:
            stack.callback(optimizer.adamw.register_step_pre_hook(partial(keep_first, optimizer)).remove)
        yield snapshots


def train_or_roll_back(
    optimizers: Sequence[FlatAdamW],
    dist: Dist,
    compute: Callable[[], dict[str, float]],
    find_anomaly: Callable[[Mapping[str, float]], str],
    publish: Callable[[], dict[str, float]],
) -> tuple[dict[str, float], str, str]:
    """Run `compute` and `publish`, or undo all updates on an anomaly. All ranks decide alike.

    An anomaly is a reason from `find_anomaly` on any rank, or a TrainingDiverged. All ranks raise the latter
    together: gradients are summed over ranks before the check, and the canary is the same on every rank.

    Returns:
        Metrics, the reason for the rollback, and a hint that only some reasons have. An empty reason means
        that the updates stand.
    """
    metrics: dict[str, float] = {}
    hint = ""
    with snapshots_before_update(optimizers) as snapshots:
        try:
            metrics = compute()
            anomaly = find_anomaly(metrics)
            if not dist.all_reduce_max_(torch.tensor([float(bool(anomaly))], device=dist.device)).item():
                return metrics | publish(), "", ""
        except TrainingDiverged as error:
            anomaly, hint = error.what, error.hint
        except Exception:  # a step that ran out of memory is computed again
            _restore(optimizers, snapshots)
            raise
    _restore(optimizers, snapshots)
    return metrics, anomaly or "another rank found a number that is not finite", hint


def _restore(optimizers: Sequence[FlatAdamW], snapshots: Mapping[str, OptimizerSnapshot]) -> None:
    for optimizer in optimizers:
        if optimizer.name in snapshots:
            restore_snapshot(optimizer, snapshots[optimizer.name])


def rollout_anomaly(examples: Sequence[TrainingExample]) -> str:
    """Name the first reward or logprob in a step's rollouts that is not finite; "" if all are finite."""
    for (row, column), of_trajectory in groupby(examples, key=lambda e: (e.group, e.trajectory)):
        calls, name = list(of_trajectory), f"trajectory {column} of group {row}"
        reward = sum(e.reward for e in calls)
        if not is_number(reward):
            return f"the reward of {name} (prompt {calls[0].prompt_id}) is {reward:g}"
        greedy = calls[0].components.get(GREEDY, 0.0)
        if not is_number(greedy):
            return f"the reward of the greedy completion of prompt {calls[0].prompt_id} is {greedy:g}"
        for e in calls:
            if e.sampling_logprobs is None:
                continue
            logprobs = e.sampling_logprobs[e.scored]
            if len(bad := np.flatnonzero(~np.isfinite(logprobs))):
                return (
                    f"the engine's logprob of token {bad[0]} in turn {e.turn} of {name} is {logprobs[bad[0]]}"
                )
    return ""


def metric_anomaly(metrics: Mapping[str, float], config: AnomalyConfig) -> str:
    """Name the first metric that is not finite or over its limit; "" if there is none."""
    for name in FINITE_METRICS:
        if not math.isfinite(metrics.get(name, 0.0)):
            return f"{name} is {metrics[name]}"
    limits = {
        "policy/kl_ref": ("anomaly.max_kl", config.max_kl),
        "mismatch/kl": ("anomaly.max_mismatch_kl", config.max_mismatch_kl),
    }
    for name, (setting, limit) in limits.items():
        if limit is not None and metrics.get(name, 0.0) > limit:
            return f"{name} is {metrics[name]:.4g}, over {setting}={limit:g}"
    return ""


def reward_collapse(run: RunDir, step: int, config: AnomalyConfig) -> str:
    """Report a mean reward below `min_reward` in each of the last `min_reward_steps` steps; "" if none."""
    first = step - config.min_reward_steps + 1
    if config.min_reward is None or first < 1:
        return ""
    paths = [run.rollout_path(k) for k in range(first, step + 1)]
    means = [mean_reward(path) for path in paths if path.exists()]
    # A skipped step whose rewards were not finite says nothing about the policy.
    if len(means) < len(paths) or not all(-math.inf < m < config.min_reward for m in means):
        return ""
    return (
        f"the mean reward was under anomaly.min_reward={config.min_reward:g} in steps {first} to {step} "
        f"(last {means[-1]:.4g})"
    )


@torch.no_grad()
def parameter_anomaly(optimizers: Sequence[FlatAdamW]) -> str:
    """Name an optimizer whose parameters are not finite after an update; "" if there is none."""
    for optimizer in optimizers:
        largest = torch.stack(torch._foreach_norm(list(optimizer.params.values()), math.inf)).tolist()
        if bad := [n for n, x in zip(optimizer.params, largest, strict=True) if not math.isfinite(x)]:
            return f"the update left {len(bad)} of the {optimizer.name}'s matrices not finite, first {bad[0]}"
    return ""


def reject_step(
    run: RunDir,
    config: TrainConfig,
    dist: Dist,
    step: int,
    anomaly: str,
    metrics: Mapping[str, float],
    checkpoint: Callable[[], object],
    hint: str = "",
) -> dict[str, float]:
    """Save the inputs of a bad step. Then skip the step, or save a `checkpoint` and raise TrainingDiverged.

    `anomaly.action` decides. `hint`: advice that replaces a lower optim.lr. Returns the metrics that a
    skipped step still has.
    """
    if dist.is_main:
        save_rejected_step(run, step, anomaly, metrics, config.anomaly)
    skipped = dist.share(consecutive_skips(run, step) if dist.is_main else None)
    if config.anomaly.action == "stop" or skipped >= config.anomaly.max_skips:
        checkpoint()
        # Wait until rank 0 has written: the first rank that fails ends all others.
        dist.all_reduce_sum_(torch.zeros(1, device=dist.device))
        before = f", and the {skipped} steps before it were skipped" if skipped else ""
        raise TrainingDiverged(
            f"Step {step} went bad: {anomaly}{before}. The update was not applied; "
            f"the rollouts and the reason are in {run.rejected_steps}.",
            "Correct the reward if it returned no number. Resume with --set anomaly.action=skip to skip "
            f"such steps, or {hint or restart_hint('optim.lr', config.optim.lr)}",
        )
    return {name: metrics.get(name, math.nan) for name in ("policy/entropy", "mismatch/logprob_diff_mean")}


def save_rejected_step(
    run: RunDir, step: int, reason: str, metrics: Mapping[str, float], config: AnomalyConfig
) -> Path:
    """Copy a bad step's rollouts to `rejected_steps/step-000012`, with the reason. Returns the folder.

    Rank 0 only.
    """
    name, number = run.rollout_path(step).stem, 1
    while (path := run.rejected_steps / (name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    rollouts = run.rollout_path(step)
    with atomic_folder(path, rollouts.stat().st_size) as folder:
        shutil.copyfile(rollouts, folder / "rollouts.parquet")
        numbers = {name: value if math.isfinite(value) else str(value) for name, value in metrics.items()}
        write_json(
            folder / "reason.json",
            {"step": step, "reason": reason, "anomaly": config.model_dump(mode="json"), "metrics": numbers},
        )
    return path


def consecutive_skips(run: RunDir, step: int) -> int:
    """The number of skipped steps in a row right before `step`."""
    count = 0
    while (path := run.trainer_step_path(step - 1 - count)).exists() and "skipped" in run.read_json(path):
        count += 1
    return count
