"""What a step samples: its prompts' groups from one adapter version, scored; more prompts where groups are replaced."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from functools import partial

from skylite.data.order import prompts_for_round, prompts_for_step
from skylite.data.tokenizer import encode_prompts
from skylite.engine.client import Sampling
from skylite.engine.collect import collect_group, gather_or_cancel, request_seed
from skylite.orchestrator.session import Session
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import AdapterVersion
from skylite.types import Group, Prompt

logger = logging.getLogger(__name__)


async def sample_step(session: Session, step: int, adapter: AdapterVersion) -> SampledStep:
    """The step's rollout groups, sampled from `adapter`, which the engines serve, or those that a resumed run has stored."""
    stored = session.plan.run.rollout_path(step)
    if stored.exists():
        return SampledStep(groups=await asyncio.to_thread(read_rollouts, stored), stored=True)
    config, train = session.plan.config, session.plan.train
    algorithm, per_step = config.algorithm, config.rollout.prompts_per_step
    first = await sample_groups(
        session, step, adapter, prompts_for_step(train, step, per_step, config.seed), first_index=0
    )
    if algorithm.zero_std_groups != "resample":
        return SampledStep(groups=first)

    async def sample_more(round_number: int, count: int) -> list[Group]:
        prompts = prompts_for_round(train, step, round_number, per_step, config.seed)[:count]
        if step == session.progress.step:  # else it is sampled ahead, and what is under way is another step
            session.progress.phase(
                "sampling",
                f"step {step} of {config.num_steps}, {count} groups with equal rewards are replaced",
            )
        return await sample_groups(session, step, adapter, prompts, first_index=round_number * per_step)

    sampled = await replace_zero_std_groups(first, sample_more, algorithm.max_resample_rounds)
    if sampled.missing:
        logger.info(
            f"step {step}: {sampled.missing} of {per_step} groups still have equal rewards after {len(sampled.left_out)} more were sampled "
            "(algorithm.max_resample_rounds); they are dropped"
        )
    return sampled


async def sample_groups(
    session: Session, step: int, adapter: AdapterVersion, prompts: Sequence[Prompt], first_index: int
) -> list[Group]:
    """A group of each prompt. Prompts are numbered from `first_index` within the step: their seeds depend on it."""
    plan, rollout = session.plan, session.plan.config.rollout
    penalty = partial(
        overlong_penalty,
        max_completion_tokens=rollout.max_completion_tokens,
        buffer_frac=plan.config.algorithm.overlong_buffer_frac,
    )
    token_ids = encode_prompts(session.tokenizer, prompts, rollout.max_prompt_tokens)
    tasks = []
    for index, prompt in enumerate(prompts, first_index):
        sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_completion_tokens,
            stop_token_ids=session.tokenizer.stop_token_ids,
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
    return await gather_or_cancel(tasks)


@dataclass(frozen=True, slots=True, kw_only=True)
class SampledStep:
    """What a step sampled."""

    groups: Sequence[Group]
    """The step's own: they go to the trainer."""
    left_out: Sequence[Group] = ()
    """Replaced by others, or sampled for nothing: each has equal rewards."""
    missing: int = 0
    """How many of `groups` should have been replaced and could not be; the trainer drops them."""
    stored: bool = False
    """Read from the step's rollout file, which is there already (a resumed run)."""

    @property
    def zero_std_frac(self) -> float:
        """Share of equal groups among all that were sampled."""
        groups = [*self.groups, *self.left_out]
        return sum(g.is_zero_std for g in groups) / len(groups)


async def replace_zero_std_groups(
    first: Sequence[Group],
    sample_more: Callable[[int, int], Awaitable[Sequence[Group]]],
    max_rounds: int,
) -> SampledStep:
    """Replace the equal groups of `first`, in their places, by those of new prompts.

    Args:
        sample_more: (round 1.., how many) -> groups of that many new prompts; fewer, or none, when there are no more prompts.
    """
    groups, left_out = list(first), []
    for round_number in range(1, max_rounds + 1):
        places = [i for i, group in enumerate(groups) if group.is_zero_std]
        if not places:
            break
        fresh = await sample_more(round_number, len(places))
        if not fresh:
            break
        left_out += [g for g in fresh if g.is_zero_std]
        for place, group in zip(places, (g for g in fresh if not g.is_zero_std), strict=False):
            left_out.append(groups[place])
            groups[place] = group
    return SampledStep(groups=groups, left_out=left_out, missing=sum(g.is_zero_std for g in groups))


def overlong_penalty(length: int, max_completion_tokens: int, buffer_frac: float) -> float:
    """Soft overlong punishment: 0, then down to -1 over the last `buffer_frac` of the length (DAPO, arXiv 2503.14476, eq. 13)."""
    buffer = buffer_frac * max_completion_tokens
    over = length - (max_completion_tokens - buffer)
    return -min(1.0, over / buffer) if buffer > 0 and over > 0 else 0.0
