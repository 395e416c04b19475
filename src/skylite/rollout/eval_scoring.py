"""Starts the reward workers or the environment that score the problems of `skylite eval`."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from skylite.config.train import TrainConfig
from skylite.data.chat_template import ChatTemplate
from skylite.data.tokenizer import ChatTokenizer, encode_in_thread, load_tokenizer, too_long
from skylite.environments.running_environment import environment_of_model
from skylite.evaluation.versions import EpisodeProblems, OneTurnProblems, ProblemSet
from skylite.rewards.worker_pool import RewardPool
from skylite.rollout.eval_data import EvalData

logger = logging.getLogger(__name__)


async def start_problems(
    stack: contextlib.AsyncExitStack,
    data: Sequence[EvalData],
    config: TrainConfig,
    template: ChatTemplate,
    model_path: Path,
    *,
    seed: int,
    logs: Path,
) -> tuple[Sequence[ProblemSet], tuple[int, ...]]:
    """One problem set for each data set, and the model's stop token ids. `stack` ends the processes.

    Args:
        seed: seeds the episodes.
        logs: folder of rewards.log or episodes.log.

    Raises SkyliteError subclasses.
    """
    tokenizer = await asyncio.to_thread(load_tokenizer, model_path, template)
    stops = tokenizer.stop_token_ids
    if not config.env.episode:
        with contextlib.closing(tokenizer):
            return await _one_turn(stack, data, config, tokenizer, logs), stops
    stack.callback(tokenizer.close)
    # Evaluations sample the model's own distribution.
    rollout = config.rollout.model_copy(update={"top_p": 1.0, "top_k": 0})
    seeded = config.model_copy(update={"seed": seed, "rollout": rollout})
    programs = data[0].programs  # all data sets share the episode function
    environment = await stack.enter_async_context(
        environment_of_model(seeded, tokenizer, model_path, programs, logs)
    )
    return [EpisodeProblems(name=d.name, prompts=d.prompts, environment=environment) for d in data], stops


async def _one_turn(
    stack: contextlib.AsyncExitStack,
    data: Sequence[EvalData],
    config: TrainConfig,
    tokenizer: ChatTokenizer,
    logs: Path,
) -> list[OneTurnProblems]:
    """Encode the prompts, in threads so that Ctrl-C is heard, and start the reward workers."""
    longest = config.rollout.max_prompt_tokens
    if config.data.filter_overlong_prompts:
        data = [await asyncio.to_thread(_without_long, d, tokenizer, longest) for d in data]
    token_ids = [await encode_in_thread(tokenizer, d.prompts, longest) for d in data]
    pools = []
    for d in data:
        pool = RewardPool(
            [d.reward],
            num_workers=config.reward.num_workers,
            timeout_s=config.reward.timeout_s,
            programs=d.programs,
            log_path=logs / "rewards.log",
            parameters=d.parameters,
            prefill=config.reward.prefill,
        )
        stack.callback(pool.close)
        pools.append(pool)
    return [
        OneTurnProblems(name=d.name, prompts=d.prompts, token_ids=ids, scorer=pool)
        for d, ids, pool in zip(data, token_ids, pools, strict=True)
    ]


def _without_long(data: EvalData, tokenizer: ChatTokenizer, limit: int) -> EvalData:
    dropped = too_long(tokenizer, data.prompts, limit)
    if dropped:
        logger.info(f"{data.name}: {len(dropped)} prompts over {limit} tokens are left out")
    return replace(data, prompts=[p for p in data.prompts if p.id not in dropped])
