"""The score of a served model in an environment."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from skylite.environments.sample_episodes import EVAL_STEP, Environment, Source
from skylite.evaluation.confidence_interval import mean_score
from skylite.evaluation.evaluate import EvalResult, require_finite_rewards
from skylite.types import Prompt


async def evaluate_episodes(
    environment: Environment,
    source: Source,
    prompts: Sequence[Prompt],
    n: int = 1,
    on_problem: Callable[[], None] = lambda: None,
) -> EvalResult:
    """`n` episodes per problem. The score is the mean of the first component, or of the reward.

    `on_problem` is called after each problem, also after one that env.on_error=drop leaves out.
    """
    groups = await environment.sample(
        source, prompts, step=EVAL_STEP, first_index=0, group_size=n, on_group=on_problem
    )
    for group in groups:
        require_finite_rewards(group)
    trajectories = [t for g in groups for t in g.trajectories]
    return EvalResult(
        model=source.model,
        temperature=source.temperature,
        score=mean_score([[t.first_score for t in g.trajectories] for g in groups]),
        completion_tokens_mean=sum(t.num_tokens for t in trajectories) / len(trajectories),
        truncated_frac=sum(t.is_truncated for t in trajectories) / len(trajectories),
        groups=groups,
        left_out=len(prompts) - len(groups),
    )
