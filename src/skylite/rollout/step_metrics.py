"""The metrics of a step, for metrics.jsonl and the screen.

Consumes: sampled groups, the trainer's step file, the report on the sync. Waits for: nothing.
Produces: a line of metrics.jsonl. Unblocks: loggers and reports, which read that file.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import SyncReport
from skylite.errors import ConfigError
from skylite.rollout.sampling import SampledStep
from skylite.types import Group, Trajectory, is_number
from skylite.ui.live_panel import CompletionView

SCREEN_METRICS = (
    "policy/entropy",
    "mismatch/logprob_diff_mean",
    "time/train_s",
    "time/canary_s",
    "time/publish_s",
)
"""The trainer's metrics that the screen shows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTimings:
    """Durations of a step, in seconds."""

    rollout_s: float
    """Sampling."""
    step_s: float
    """From the record of the step before to the record of this one."""
    sync_s: float = 0.0
    """From the end of training until every engine has loaded the adapter: trainer canary, files, load."""
    overlap_s: float = 0.0
    """The part of rollout_s during which an earlier step was trained."""
    overhead_s: float = 0.0
    """The part of step_s without sampling or training."""


def step_metrics(
    step: int, sampled: SampledStep, update: dict[str, Any], report: SyncReport, times: StepTimings
) -> dict[str, Any]:
    """One line of metrics.jsonl: rollouts, trainer, adapter sync."""
    trajectories = [t for g in sampled.groups for t in g.trajectories]
    trainer_canary_s = update["time/canary_s"]
    return {
        "step": step,
        "adapter/version": step,
        "completion/tokens_mean": statistics.fmean(t.num_tokens for t in trajectories),
        **(sampling_metrics(step, sampled, report, times) if was_sampled(trajectories) else _canary(report)),
        **sampled.counts,
        **(turn_metrics(trajectories) if has_turns(trajectories) else {}),
        "rollout/stored": float(sampled.stored),
        "time/rollout_s": times.rollout_s,
        "time/load_s": report.load_s,
        "time/step_s": times.step_s,
        "time/sync_s": times.sync_s,
        "time/overlap_s": times.overlap_s,
        "time/overhead_s": times.overhead_s,
        **update,
        "time/canary_s": trainer_canary_s + report.canary_s,
        "sync/publish_and_load_frac": (update["time/publish_s"] + report.load_s) / times.step_s,
    }


def sampling_metrics(
    step: int, sampled: SampledStep, report: SyncReport, times: StepTimings
) -> dict[str, Any]:
    """Metrics of engines and what they sampled. Rewards are scores without penalties."""
    trajectories = [t for g in sampled.groups for t in g.trajectories]
    left_out = [t for g in sampled.left_out for t in g.trajectories]
    tokens = [t.num_tokens for t in trajectories]
    num_sampled = sum(tokens) + sum(t.num_tokens for t in left_out)
    mean, deviation = mean_and_std([t.reward for t in trajectories])
    sampled_mean, _ = mean_and_std([t.reward for t in trajectories + left_out])
    staleness = [step - 1 - s.adapter_version for t in trajectories for s in t.calls]
    return {
        "reward/mean": mean,
        "reward/std": deviation,
        "reward/right_frac": statistics.fmean(t.first_score == 1.0 for t in trajectories),
        "reward/partial_frac": statistics.fmean(t.first_score not in (0.0, 1.0) for t in trajectories),
        "reward/tokens_corr": correlation([t.reward for t in trajectories], tokens),
        **component_means(trajectories),
        "reward/penalty_mean": statistics.fmean(t.penalty for t in trajectories),
        # Resampling selects groups by reward, which biases reward/mean. This mean includes all groups.
        "reward/sampled_mean": sampled_mean,
        "groups/resampled": len(sampled.left_out),
        "groups/zero_std_sampled_frac": sampled.zero_std_frac,
        "groups/missing": sampled.missing,
        "groups/dropped": sampled.dropped,
        "completion/truncated_frac": statistics.fmean(t.is_truncated for t in trajectories),
        "perf/completion_tokens_per_s": math.nan if sampled.stored else num_sampled / times.rollout_s,
        "staleness/mean": statistics.fmean(staleness),
        "staleness/max": max(staleness),
        **report.canary.as_metrics(),
    }


def _canary(report: SyncReport) -> dict[str, float]:
    """Of a step that learns from a file. Nothing in a run without engines."""
    return {} if math.isnan(report.canary.gap_max) else report.canary.as_metrics()


def was_sampled(trajectories: Sequence[Trajectory]) -> bool:
    """Whether an engine sampled the trajectories, and not a file held them."""
    return any(call.sampling_logprobs for t in trajectories for call in t.calls)


def has_turns(trajectories: Sequence[Trajectory]) -> bool:
    """Whether the trajectories show that an environment made them."""
    return any(len(t.calls) > 1 or t.end != "stop" for t in trajectories)


def component_means(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """`reward/NAME`: mean of each reward function's unweighted scores. Empty for a single function."""
    names = list(trajectories[0].components)
    if len(names) < 2:
        return {}
    scores = {name: [t.components.get(name, math.nan) for t in trajectories] for name in names}
    return {f"reward/{name}": mean_and_std(scores[name])[0] for name in names}


def mean_and_std(rewards: Sequence[float]) -> tuple[float, float]:
    """Mean and population std. Both are nan if a reward is not finite in float32: `statistics` may raise."""
    if not all(map(is_number, rewards)):
        return math.nan, math.nan
    return statistics.fmean(rewards), statistics.pstdev(rewards)


def correlation(rewards: Sequence[float], tokens: Sequence[int]) -> float:
    """Pearson's correlation; nan if either is constant or a reward is not finite."""
    if not all(map(is_number, rewards)) or len(set(rewards)) < 2 or len(set(tokens)) < 2:
        return math.nan
    return statistics.correlation(rewards, tokens)


def trainer_metrics(update: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer's metrics from its step file, with the reason if the step was skipped."""
    skipped = {"anomaly/skipped": 1.0, "anomaly/reason": update["skipped"]} if "skipped" in update else {}
    return {**update["metrics"], **skipped}


def require_numbers(update: Mapping[str, Any], path: Path) -> None:
    """Raise ConfigError if the metrics in the trainer's step file `path` are no numbers."""
    metrics = update.get("metrics", {})
    numbers = isinstance(metrics, dict) and all(isinstance(v, float | int) for v in metrics.values())
    if not numbers or not isinstance(update.get("skipped", ""), str):
        raise ConfigError(f"{path} holds no metrics.", "The run is damaged; start a new one.")


def recovered_metrics(step: int, groups: Sequence[Group], update: Mapping[str, Any]) -> dict[str, Any]:
    """Metrics of a finished step that the parent did not record before it died. Unknown values are nan.

    `update` is empty if the trainer died too, after it wrote the step's checkpoint.
    """
    nan = math.nan
    unseen = CanaryReading(gap_max=nan, gap_mean=nan, base_distance=nan, projection=nan)
    report = SyncReport(load_s=nan, canary_s=nan, canary=unseen)
    times = StepTimings(rollout_s=nan, step_s=nan, sync_s=nan, overlap_s=nan, overhead_s=nan)
    trained = dict.fromkeys(SCREEN_METRICS, nan) | (trainer_metrics(update) if "metrics" in update else {})
    return step_metrics(step, SampledStep(groups=groups, stored=True), trained, report, times)


def completion_view(groups: Sequence[Group]) -> CompletionView:
    """One completion for the screen: the best of the first group with mixed rewards, else of group 0."""
    mixed = next((g for g in groups if len({t.reward for t in g.trajectories}) > 1), groups[0])
    best = max(mixed.trajectories, key=lambda t: t.reward)
    return CompletionView(
        question=mixed.prompt.messages[-1]["content"],
        completion=best.text,
        reward=best.reward,
        answer=mixed.prompt.answer,
    )


Interval = tuple[float, float]
"""Start and end in seconds of time.monotonic(), which all processes of a machine share."""


def busy_s(window: Interval, intervals: Iterable[Interval]) -> float:
    """Seconds of `window` that at least one of `intervals` covers."""
    total, reached = 0.0, window[0]
    for start, end in sorted(intervals):
        start, end = max(start, reached), min(end, window[1])
        total += max(0.0, end - start)
        reached = max(reached, end)
    return total


TokenArray = npt.NDArray[np.int64]


def turn_metrics(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Turns, tokens that calls share, and trajectories that a limit ended.

    `turns/reused_frac`: share of the later prompts' tokens that begin an earlier call of the trajectory.
    `turns/branches_mean`: later calls per trajectory whose prompt does not contain a complete earlier call.
    `turns/rerendered_tokens`: tokens per trajectory that these calls render again: after the longest common
    prefix with an earlier call, and before the end of that call.
    """
    prompt_tokens, reused_tokens, branches, rerendered_tokens = 0, 0, 0, 0
    for trajectory in trajectories:
        earlier: list[TokenArray] = []
        for call in trajectory.calls:
            prompt = np.asarray(call.prompt_token_ids, dtype=np.int64)
            if earlier:
                shared = [(common_prefix(prompt, call), len(call)) for call in earlier]
                longest, known = max(shared)
                prompt_tokens += len(prompt)
                reused_tokens += longest
                if all(length < total for length, total in shared):
                    branches += 1
                    rerendered_tokens += min(len(prompt), known) - longest
            earlier.append(np.append(prompt, call.completion_token_ids))
    return {
        "turns/mean": statistics.fmean(len(t.calls) for t in trajectories),
        "turns/max": float(max(len(t.calls) for t in trajectories)),
        "turns/reused_frac": reused_tokens / prompt_tokens if prompt_tokens else 1.0,
        "turns/branches_mean": branches / len(trajectories),
        "turns/rerendered_tokens": rerendered_tokens / len(trajectories),
        "turns/limited_frac": statistics.fmean(t.end != "stop" for t in trajectories),
    }


def common_prefix(a: TokenArray, b: TokenArray) -> int:
    """Length of the common prefix, in tokens."""
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
