"""The score of a served model on prepared problems."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.environments.source import GroupRequest, RolloutSource
from skylite.errors import non_finite_reward
from skylite.evaluation.confidence_interval import MeanScore, mean_score
from skylite.run.files import atomic_file
from skylite.types import Group, Prompt, Trajectory, is_number


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one model on one set of problems."""

    model: str
    temperature: float
    score: MeanScore
    completion_tokens_mean: float
    truncated_frac: float
    groups: Sequence[Group]
    left_out: int = 0
    """Problems without a group, because an episode failed (env.on_error=drop)."""

    @property
    def turns_mean(self) -> float:
        """Calls of the model per trajectory."""
        trajectories = [t for g in self.groups for t in g.trajectories]
        return sum(len(t.calls) for t in trajectories) / len(trajectories)


async def evaluate(
    source: RolloutSource,
    prompts: Sequence[Prompt],
    request: GroupRequest,
    on_problem: Callable[[], None] = lambda: None,
) -> EvalResult:
    """Sample groups of the problems (temperature 0: greedily) and average their first scores.

    `on_problem` is called after each problem. Raises RunFailed for a NaN or infinite score.
    """

    def check(group: Group | None) -> None:
        if group is not None:
            require_finite_rewards(group)
        on_problem()

    groups = await source.sample(prompts, request, check)
    trajectories = [t for g in groups for t in g.trajectories]
    return EvalResult(
        model=request.model,
        temperature=request.temperature,
        score=mean_score([[t.first_score for t in g.trajectories] for g in groups]),
        completion_tokens_mean=sum(t.num_tokens for t in trajectories) / len(trajectories),
        truncated_frac=sum(t.is_truncated for t in trajectories) / len(trajectories),
        groups=groups,
        left_out=len(prompts) - len(groups),
    )


def require_finite_rewards(group: Group) -> None:
    """Raise RunFailed for a NaN or infinite score."""
    for t in group.trajectories:
        if not is_number(t.first_score):
            name = next(iter(t.components), "reward")
            raise non_finite_reward(name, repr(t.first_score), group.prompt.id, t.calls[-1].text)


def write_results(path: Path, result: EvalResult) -> None:
    """Write one row per completion to a parquet file. Raises WriteFailed."""
    rows = [_row(result, group.prompt, t) for group in result.groups for t in group.trajectories]
    table = pa.Table.from_pylist(rows)
    with atomic_file(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def _row(result: EvalResult, prompt: Prompt, trajectory: Trajectory) -> dict[str, Any]:
    last = trajectory.calls[-1]
    return {
        "prompt_id": prompt.id,
        "difficulty": prompt.difficulty,
        "question": prompt.messages[-1]["content"],
        "answer": prompt.answer,
        "completion": last.text,
        "turns": [call.text for call in trajectory.calls],
        "observed": [call.observed for call in trajectory.calls],
        "end": trajectory.end,
        "reward": trajectory.first_score,
        "tokens": trajectory.num_tokens,
        "finish_reason": last.finish_reason,
        "model": result.model,
        "temperature": result.temperature,
    }
