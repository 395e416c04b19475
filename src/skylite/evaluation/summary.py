"""The numbers of an evaluation, as JSON and as lines for a person."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from skylite.config.rollout import RewardParameters
from skylite.evaluation.confidence_interval import MeanScore, mean_score, score_name
from skylite.evaluation.evaluate import EvalResult
from skylite.evaluation.scores import answer_of, can_vote, ks_for, majority_score, pass_at_k
from skylite.types import Group


def scores_of(result: EvalResult) -> list[list[float]]:
    """[problems][samples] scores of the first reward function."""
    return [[t.first_score for t in group.trajectories] for group in result.groups]


def metrics_of(result: EvalResult, reward: str, parameters: RewardParameters) -> dict[str, Any]:
    """The metrics of one model on one data set.

    pass@k counts a score of 1 as right. The majority vote needs more than two samples and a reward with
    answers to compare (gsm8k, math, exact_match).
    """
    scores = scores_of(result)
    n = len(scores[0])
    found: dict[str, Any] = {
        "problems": len(scores),
        "n": n,
        "temperature": result.temperature,
        "score": result.score.name,
        "mean": result.score.mean,
        "low": result.score.low,
        "high": result.score.high,
        "standard_error": result.score.standard_error,
        "completion_tokens_mean": result.completion_tokens_mean,
        "truncated_frac": result.truncated_frac,
        "turns_mean": result.turns_mean,
        "left_out": result.left_out,
    }
    if n > 1:
        found["pass_at"] = {str(k): as_json(_pass_at(scores, k)) for k in ks_for(n)}
    if n > 2 and can_vote(reward):
        found["majority"] = as_json(mean_score([[_majority(g, reward, parameters)] for g in result.groups]))
    return found


def as_json(accuracy: MeanScore) -> dict[str, float]:
    return {"mean": accuracy.mean, "low": accuracy.low, "high": accuracy.high}


def lines_of(metrics: dict[str, Any]) -> list[str]:
    """The metrics for a person."""
    n, problems, name = metrics["n"], metrics["problems"], metrics["score"]
    is_binary = name == score_name(is_binary=True)
    head = f"{name}, greedy" if n == 1 else f"{name} of {n} samples at T 1"
    rows = {head: {"mean": metrics["mean"], "low": metrics["low"], "high": metrics["high"]}}
    rows |= {f"pass@{k}": value for k, value in metrics.get("pass_at", {}).items() if k != "1"}
    if "majority" in metrics:
        rows[f"majority of {n}"] = metrics["majority"]
    width = max(map(len, rows))
    lines = [f"  {row:{width}}  {with_interval(v, is_binary or row != head)}" for row, v in rows.items()]
    turns, left_out = metrics["turns_mean"], metrics["left_out"]
    what = "completion" if turns == 1 else f"episode, {turns:.1f} turns each"
    lines.append(
        f"  {problems} problems, {metrics['completion_tokens_mean']:.1f} tokens per {what}, "
        f"{100 * metrics['truncated_frac']:.1f} % truncated"
    )
    if left_out:
        lines.append(f"  {left_out} more left out, because an episode failed (env.on_error=drop)")
    return lines


def with_interval(value: dict[str, float], is_binary: bool) -> str:
    """A mean and its 95 % interval: an accuracy in percent, a reward as it is."""
    if not is_binary:
        return f"{value['mean']:7.3g}  ({value['low']:.3g} to {value['high']:.3g})"
    return f"{100 * value['mean']:5.1f} %  ({100 * value['low']:.1f} to {100 * value['high']:.1f})"


def _pass_at(scores: Sequence[Sequence[float]], k: int) -> MeanScore:
    return mean_score([[pass_at_k(len(row), sum(s == 1.0 for s in row), k)] for row in scores])


def _majority(group: Group, reward: str, parameters: RewardParameters) -> float:
    answers = [answer_of(reward, t.calls[-1].text, parameters) for t in group.trajectories]
    return majority_score(answers, [t.first_score for t in group.trajectories])
