"""Sample one step: groups of completions from one adapter version, with rewards.

Consumes: prompts of the step. Waits for: the rollout source, over several rounds where groups are replaced.
Produces: the step's groups. Unblocks: the rollout file, for which the trainer waits.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skylite.data.prompt_order import prompts_for_round, prompts_for_step
from skylite.environments.source import GroupRequest
from skylite.progress_reporting import long_work
from skylite.rollout.session import Session
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import AdapterVersion
from skylite.types import Group, Prompt

logger = logging.getLogger(__name__)


async def sample_step(session: Session, step: int, adapter: AdapterVersion) -> SampledStep:
    """Return the rollout groups of a step.

    They are sampled from `adapter`, which the engines have loaded. If a resumed run already has the step's
    rollout file, its groups are returned instead.
    """
    stored = session.plan.run.rollout_path(step)
    if stored.exists():
        return SampledStep(groups=await asyncio.to_thread(read_rollouts, stored), stored=True)
    chosen: list[Prompt] = []
    sampled = await _sample_step(session, step, adapter, chosen)
    counts: dict[str, float] = {}
    if (history := session.history) is not None:
        counts["prompts/retired"] = float(len(history.prompts) - history.num_active(step))
        history.record(step, chosen, [*sampled.groups, *sampled.left_out])
    return await with_teacher(session, replace(sampled, counts=counts))


async def with_teacher(session: Session, sampled: SampledStep) -> SampledStep:
    """The groups of a step, scored by a teacher's server; with its metrics and the judge's."""
    counts = dict(sampled.counts)
    if session.judge is not None:
        counts |= session.judge.take_metrics()
    if session.teacher is not None:
        taught, of_teacher = await session.teacher.taught(sampled.groups)
        sampled, counts = replace(sampled, groups=taught), counts | of_teacher
    return replace(sampled, counts=counts)


async def _sample_step(
    session: Session, step: int, adapter: AdapterVersion, chosen: list[Prompt]
) -> SampledStep:
    """The groups of a step. Adds their prompts to `chosen`."""
    config = session.plan.config
    algorithm, per_step = config.algorithm, config.rollout.prompts_per_step
    chosen += prompts_of(session, step, 0)
    first = await sample_groups(session, step, adapter, chosen, first_index=0)
    dropped = per_step - len(first)
    if algorithm.zero_std_groups != "resample":
        return SampledStep(groups=first, dropped=dropped)

    async def sample_more(round_number: int, count: int) -> list[Group]:
        nonlocal dropped
        prompts = prompts_of(session, step, round_number)[:count]
        chosen.extend(prompts)
        if step == session.progress.step:  # otherwise this step is sampled ahead of the one on screen
            session.progress.phase(
                "sampling",
                f"step {step} of {config.num_steps}, replacing {count} groups with equal rewards",
            )
        fresh = await sample_groups(session, step, adapter, prompts, first_index=round_number * per_step)
        dropped += len(prompts) - len(fresh)
        return fresh

    sampled = await replace_zero_std_groups(first, sample_more, algorithm.max_resample_rounds)
    if sampled.missing:
        logger.info(
            f"step {step}: {sampled.missing} of {per_step} groups still have equal rewards after "
            f"{len(sampled.left_out)} more were sampled (algorithm.max_resample_rounds); they are dropped"
        )
    return replace(sampled, dropped=dropped)


def prompts_of(session: Session, step: int, round_number: int) -> list[Prompt]:
    """The prompts of a step (round 0), or those that replace its groups of equal rewards."""
    if session.history is not None:
        return session.history.chosen(step, round_number)
    train, config = session.plan.train, session.plan.config
    per_step, seed = config.rollout.prompts_per_step, config.seed
    if round_number == 0:
        return prompts_for_step(train, step, per_step, seed)
    return prompts_for_round(train, step, round_number, per_step, seed)


async def sample_groups(
    session: Session, step: int, adapter: AdapterVersion, prompts: Sequence[Prompt], first_index: int
) -> list[Group]:
    """Sample one group per prompt.

    `first_index`: number of the first prompt within the step. The request seeds depend on the prompt numbers.
    """
    request = request_of(session, step, adapter, first_index)
    with long_work(f"sampling step {step}", len(prompts)) as work:
        return await session.source.sample(prompts, request, lambda _: work.advance())


def request_of(session: Session, step: int, adapter: AdapterVersion, first_index: int = 0) -> GroupRequest:
    """A request for groups of a step, from `adapter`."""
    rollout = session.plan.config.rollout
    return GroupRequest(
        model=adapter.name,
        version=adapter.version,
        engines=session.engines.engines,
        temperature=rollout.temperature,
        group_size=rollout.group_size,
        step=step,
        first_index=first_index,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """The groups that a step sampled."""

    groups: Sequence[Group]
    """They go to the trainer."""
    left_out: Sequence[Group] = ()
    """Groups of equal rewards that were sampled and discarded."""
    missing: int = 0
    """Number of `groups` that still have equal rewards after resampling; the trainer drops them."""
    dropped: int = 0
    """Groups that are not in `groups`, because an episode failed (env.on_error=drop) or the judge gave no
    points (reward.judge.on_unparsed=drop)."""
    counts: Mapping[str, float] = field(default_factory=dict)
    """Metrics of the judge, of a teacher's server and of the prompts' history."""
    batches: Sequence[int] = ()
    """Of each group, the batch that it started with (unordered_steps.py). Empty: that of the step."""
    stored: bool = False
    """Read from the rollout file of an earlier attempt (resumed run)."""

    @property
    def zero_std_frac(self) -> float:
        """Fraction of groups with equal rewards among all sampled groups."""
        groups = [*self.groups, *self.left_out]
        return sum(g.is_zero_std for g in groups) / len(groups)


async def replace_zero_std_groups(
    first: Sequence[Group],
    sample_more: Callable[[int, int], Awaitable[Sequence[Group]]],
    max_rounds: int,
) -> SampledStep:
    """Replace groups of equal rewards by groups of new prompts, at the same positions.

    Args:
        first: the groups sampled so far.
        sample_more: (round number from 1, count) -> groups of `count` new prompts; fewer if none are left.
        max_rounds: maximum number of calls of `sample_more`.
    """
    groups, left_out = list(first), []
    for round_number in range(1, max_rounds + 1):
        positions = [i for i, group in enumerate(groups) if group.is_zero_std]
        if not positions:
            break
        fresh = await sample_more(round_number, len(positions))
        if not fresh:
            break
        left_out += [g for g in fresh if g.is_zero_std]
        for position, group in zip(positions, (g for g in fresh if not g.is_zero_std), strict=False):
            left_out.append(groups[position])
            groups[position] = group
    return SampledStep(groups=groups, left_out=left_out, missing=sum(g.is_zero_std for g in groups))
