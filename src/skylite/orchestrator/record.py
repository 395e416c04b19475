"""A step in numbers: what metrics.jsonl holds and the screen shows."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from typing import Any

from skylite.orchestrator.resample import SampledStep
from skylite.rollout.engines import SyncReport
from skylite.types import RolloutGroup
from skylite.ui.page import CompletionView


def step_metrics(
    step: int, sampled: SampledStep, update: dict[str, Any], report: SyncReport, *, rollout_s: float, step_s: float
) -> dict[str, Any]:
    """One line of metrics.jsonl: rollout side, the trainer's own, and the sync. Rewards are raw scores, without penalties."""
    rollouts = [r for g in sampled.groups for r in g.rollouts]
    left_out = [r for g in sampled.left_out for r in g.rollouts]
    tokens = [len(r.completion.token_ids) for r in rollouts]
    rewards = [r.reward for r in rollouts]
    trainer_canary_s = update["time/canary_s"]
    return {
        "step": step,
        "adapter/version": step,
        "reward/mean": statistics.fmean(rewards),
        "reward/std": statistics.pstdev(rewards),
        "reward/right_frac": statistics.fmean(r == 1.0 for r in rewards),
        "reward/penalty_mean": statistics.fmean(r.penalty for r in rollouts),
        # With groups chosen by their rewards the mean above no longer tells how good the policy is; this one does.
        "reward/sampled_mean": statistics.fmean(r.reward for r in rollouts + left_out),
        "groups/resampled": len(sampled.left_out),
        "groups/equal_sampled_frac": sampled.equal_frac,
        "groups/missing": sampled.missing,
        "completion/tokens_mean": statistics.fmean(tokens),
        "completion/truncated_frac": statistics.fmean(r.completion.finish_reason == "length" for r in rollouts),
        "perf/completion_tokens_per_s": (sum(tokens) + sum(len(r.completion.token_ids) for r in left_out)) / rollout_s,
        "time/rollout_s": rollout_s,
        "time/load_s": report.load_s,
        "time/step_s": step_s,
        **report.canary.as_metrics(),
        **update,
        "time/canary_s": trainer_canary_s + report.canary_s,
        "sync/publish_and_load_frac": (update["time/publish_s"] + report.load_s) / step_s,
    }


def completion_view(groups: Sequence[RolloutGroup]) -> CompletionView:
    """One completion for the screen: a right one of the first mixed group where there is one."""
    mixed = next((g for g in groups if len({r.reward for r in g.rollouts}) > 1), groups[0])
    best = max(mixed.rollouts, key=lambda r: r.reward)
    return CompletionView(
        question=best.prompt.messages[-1]["content"], completion=best.completion.text, reward=best.reward, answer=best.prompt.answer
    )
