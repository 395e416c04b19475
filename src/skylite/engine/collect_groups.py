"""Collects scored groups: one request samples the group of a prompt, which is scored on arrival."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from skylite.engine.retrying_client import Engine
from skylite.engine.vllm.client import Sampling
from skylite.types import Group, Prompt, Score, Trajectory

T = TypeVar("T")


class Scorer(Protocol):
    """Scores completions: rewards.pool.RewardPool, or a fake in tests."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One score for each (prompt, completion text)."""


def request_seed(seed: int, step: int, index: int) -> int:
    """The seed of a request: a hash of run seed, step and prompt index.

    Sample i uses seed + i, so the seeds of two requests must be far apart.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


async def collect_group(
    client: Engine,
    model: str,
    version: int,
    prompt: Prompt,
    prompt_token_ids: list[int],
    n: int,
    sampling: Sampling,
    scorer: Scorer,
    penalty: Callable[[int], float] = lambda length: 0.0,
) -> Group:
    """Sample `n` completions of one prompt and score them: a group of one-turn trajectories.

    `penalty`: number of sampled tokens -> penalty in the training reward, at most 0.
    """
    calls = await client.generate(model, prompt_token_ids, n, sampling, version)
    scores = await scorer.score([(prompt, call.text) for call in calls])
    trajectories = [
        Trajectory(
            calls=(call,),
            reward=score.reward,
            components=score.components,
            penalty=penalty(len(call.completion_token_ids)),
        )
        for call, score in zip(calls, scores, strict=True)
    ]
    return Group(prompt=prompt, trajectories=tuple(trajectories))


async def gather_or_cancel(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order. The first failure cancels the other tasks and is raised."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
