"""Starts what samples and scores the problems of `skylite eval`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skylite.data.chat_tokenizer import ChatTemplate, load_tokenizer
from skylite.environments.source import RolloutSource
from skylite.evaluation.versions import ProblemSet
from skylite.processes.child import Supervisor
from skylite.rollout.eval_data import EvalData
from skylite.rollout.sources import ScoredData, source_for

logger = logging.getLogger(__name__)


async def start_problems(
    stack: contextlib.AsyncExitStack,
    data: Sequence[EvalData],
    template: ChatTemplate,
    model_path: Path,
    *,
    seed: int,
    logs: Path,
) -> list[ProblemSet]:
    """One problem set for each data set. `stack` ends the processes.

    Args:
        seed: seeds the requests.
        logs: folder of rewards.log or episodes.log.

    Raises SkyliteError subclasses.
    """
    supervisor = await stack.enter_async_context(Supervisor())
    tokenizer = await asyncio.to_thread(load_tokenizer, model_path, template)
    stack.callback(tokenizer.close)
    sources: dict[str, RolloutSource] = {}
    problem_sets = []
    for d in data:
        scored = _as_evaluated(d.scored, seed)
        source = source_for(scored.config)
        prompts = await asyncio.to_thread(
            source.check_prompts, tokenizer, scored.config, model_path, d.prompts, []
        )
        if prompts.dropped:
            limit = scored.config.rollout.max_prompt_tokens
            logger.info(f"{d.name}: {len(prompts.dropped)} prompts over {limit} tokens are left out")
        key = f"{scored.rewards} {scored.config.reward!r}"
        if key not in sources:  # data sets with the same scorer share its processes
            sources[key] = await stack.enter_async_context(
                source.running(scored, tokenizer, model_path, logs, supervisor)
            )
        problem_sets.append(ProblemSet(name=d.name, prompts=prompts.train, source=sources[key]))
    return problem_sets


def _as_evaluated(scored: ScoredData, seed: int) -> ScoredData:
    """Evaluations sample the model's own distribution."""
    rollout = scored.config.rollout.model_copy(update={"top_p": 1.0, "top_k": 0})
    return replace(scored, config=scored.config.model_copy(update={"seed": seed, "rollout": rollout}))
