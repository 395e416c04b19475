"""From prompts to scored groups: one request samples a prompt's group, which is scored as soon as it arrives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from skylite.engine.client import Sampling
from skylite.engine.engine import Engine
from skylite.types import Group, Prompt, Score, Trajectory

T = TypeVar("T")


class Scorer(Protocol):
    """What scores completions (skylite.rewards.pool.RewardPool, or a fake)."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        """One score for each (prompt, completion text)."""


def request_seed(seed: int, step: int, index: int) -> int:
    """A request's seed as a pure function of run seed, step and prompt index, spread so that no two requests share sample seeds."""
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

    `penalty`: sampled tokens -> what is added for training, at most 0.
    """
    samples = await client.generate(model, prompt_token_ids, n, sampling, version)
    scores = await scorer.score([(prompt, s.text) for s in samples])
    trajectories = [
        Trajectory(
            samples=(sample,),
            reward=score.reward,
            components=score.components,
            penalty=penalty(len(sample.completion_token_ids)),
        )
        for sample, score in zip(samples, scores, strict=True)
    ]
    return Group(prompt=prompt, trajectories=tuple(trajectories))


async def gather_or_cancel(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order; the first failure cancels the rest and is raised."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
