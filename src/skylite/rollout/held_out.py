"""Evaluations on the held-out problems before, between and after the steps of a run.

Consumes: held-out prompts and a loaded version. Waits for: the rollout source.
Produces: evals/ and the scores. Unblocks: sampling of the next step.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from skylite.config.train import TrainConfig
from skylite.environments.source import GroupRequest
from skylite.evaluation.confidence_interval import MeanScore
from skylite.evaluation.evaluate import EvalResult, evaluate, write_results
from skylite.progress_reporting import long_work
from skylite.rollout.plan import RunPlan
from skylite.rollout.session import Session
from skylite.run.metrics_file import (
    EVAL_METRIC,
    Label,
    add_to_step,
    held_out_scores,
    scores_are_binary,
    write_score,
)


def is_evaluated_after(config: TrainConfig, step: int) -> bool:
    """Whether the held-out problems are evaluated between this step and the next."""
    return config.eval.every > 0 and step % config.eval.every == 0 and 0 < step < config.num_steps


async def evaluate_at_start(session: Session, versions: Sequence[int]) -> None:
    """Evaluate before the first step.

    A new run evaluates version 0. A resumed run repeats an interrupted evaluation, if its version is loaded.
    """
    plan = session.plan
    if plan.first_step == 1:
        await evaluate_held_out(session, "before", version=0)
        return
    scores = held_out_scores(plan.run, plan.config.eval)
    for version in (v for v in versions if is_evaluated_after(plan.config, v) and v not in scores):
        await evaluate_held_out(session, "step", version=version)


async def evaluate_held_out(session: Session, label: Label, version: int) -> None:
    """The score on the held-out rows, if the run has any, shown and saved in evals/."""
    plan = session.plan
    if not plan.held_out:
        return
    session.progress.phase("evaluating", f"{label}: {len(plan.held_out)} held-out rows")
    if plan.config.source.name == "offline":
        score, text = trainer_score(plan, version)
    else:
        result = await _evaluate(session, version)
        write_results(plan.run.evals / f"{label}-v{version:06d}.parquet", result)
        # One partial score so far makes all of them rewards.
        is_binary = result.score.is_binary and scores_are_binary(plan.run)
        score, shown = result.score, replace(result.score, is_binary=is_binary)
        text = f"greedy {shown.name} {shown}"
        add_to_step(plan.run.metrics_path, version, {EVAL_METRIC: score.mean})
    write_score(plan.run, label, version, score.mean, plan.config.eval, is_binary=score.is_binary)
    when = f"step {version}: " if label == "step" else ""
    session.progress.screen.evaluation(label, f"{when}{text}")


def trainer_score(plan: RunPlan, version: int) -> tuple[MeanScore, str]:
    """The share of held-out tokens or pairs that the policy gets right, and a text with the loss.

    The trainer scored the version before it wrote the step's file.
    """
    metrics = plan.run.read_json(plan.run.trainer_step_path(version))["metrics"]
    score = MeanScore(float(metrics[EVAL_METRIC]), math.nan, math.nan, len(plan.held_out), is_binary=True)
    return score, f"accuracy {score.value}, loss {metrics['eval/loss']:.4g} ({len(plan.held_out)} rows)"


async def _evaluate(session: Session, version: int) -> EvalResult:
    request = GroupRequest(
        model=session.adapter(version).name, version=version, engines=session.engines.engines, temperature=0.0
    )
    with long_work("evaluating", len(session.plan.held_out)) as work:
        return await evaluate(session.source, session.plan.held_out, request, work.advance)
