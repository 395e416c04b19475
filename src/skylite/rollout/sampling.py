"""Sample one step: groups of completions from one adapter version, with rewards."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

from skylite.data.prompt_order import prompts_for_round, prompts_for_step
from skylite.data.tokenizer import encode_in_thread
from skylite.engine.collect_groups import collect_group, gather_or_cancel, request_seed
from skylite.engine.vllm.client import Sampling
from skylite.environments.sample_episodes import Source
from skylite.progress_reporting import long_work
from skylite.rollout.session_resources import Session
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
    config, train = session.plan.config, session.plan.train
    algorithm, per_step = config.algorithm, config.rollout.prompts_per_step
    first = await sample_groups(
        session, step, adapter, prompts_for_step(train, step, per_step, config.seed), first_index=0
    )
    dropped = 0 if session.environment is None else per_step - len(first)
    if algorithm.zero_std_groups != "resample":
        return SampledStep(groups=first, dropped=dropped)

    async def sample_more(round_number: int, count: int) -> list[Group]:
        nonlocal dropped
        prompts = prompts_for_round(train, step, round_number, per_step, config.seed)[:count]
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


async def sample_groups(
    session: Session, step: int, adapter: AdapterVersion, prompts: Sequence[Prompt], first_index: int
) -> list[Group]:
    """Sample one group per prompt.

    `first_index`: number of the first prompt within the step. The request seeds depend on the prompt numbers.
    """
    plan, rollout = session.plan, session.plan.config.rollout
    if session.environment is not None:
        source = Source(
            model=adapter.name,
            version=adapter.version,
            engines=session.engines.engines,
            temperature=rollout.temperature,
        )
        with long_work(f"sampling step {step}", len(prompts)) as work:
            return await session.environment.sample(
                source,
                prompts,
                step=step,
                first_index=first_index,
                group_size=rollout.group_size,
                on_group=work.advance,
            )
    assert session.scorer is not None, "a run without an environment has reward workers"
    penalty = partial(
        overlong_penalty,
        max_completion_tokens=rollout.max_completion_tokens,
        buffer_frac=plan.config.algorithm.overlong_buffer_frac,
    )
    token_ids = await encode_in_thread(session.tokenizer, prompts, rollout.max_prompt_tokens)
    tasks = []
    for index, prompt in enumerate(prompts, first_index):
        sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_completion_tokens,
            stop_token_ids=session.tokenizer.stop_token_ids,
            stop=tuple(rollout.stop),
            seed=request_seed(plan.config.seed, step, index),
        )
        client, ids = session.engines.engine_for(index), token_ids[prompt.id]
        group = collect_group(
            client,
            adapter.name,
            adapter.version,
            prompt,
            ids,
            rollout.group_size,
            sampling,
            session.scorer,
            penalty,
        )
        tasks.append(asyncio.create_task(group))
    with long_work(f"sampling step {step}", len(prompts)) as work:
        for task in tasks:
            task.add_done_callback(lambda _: work.advance())
        return await gather_or_cancel(tasks)


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
    """Groups that are not in `groups`, because an episode failed (env.on_error=drop)."""
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


def overlong_penalty(length: int, max_completion_tokens: int, buffer_frac: float) -> float:
    """Soft overlong punishment (DAPO, arXiv 2503.14476, eq. 13).

    0 up to the last `buffer_frac` of `max_completion_tokens`, then linear down to -1.
    """
    buffer = buffer_frac * max_completion_tokens
    over = length - (max_completion_tokens - buffer)
    return -min(1.0, over / buffer) if buffer > 0 and over > 0 else 0.0
