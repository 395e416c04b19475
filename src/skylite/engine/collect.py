"""Prompts to scored rollout groups: sample each prompt's group in one request, score each group as it arrives."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Protocol, TypeVar

from skylite.engine.client import Sampling
from skylite.engine.engine import Engine
from skylite.types import Prompt, Rollout, RolloutGroup

T = TypeVar("T")


class Scorer(Protocol):
    """What scores completions (skylite.rewards.pool.RewardPool, or a fake)."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[float]:
        """One reward a (prompt, completion text)."""


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
) -> RolloutGroup:
    """Sample `n` completions of one prompt and score them. `penalty`: completion tokens -> what is added for training, <= 0."""
    completions = await client.generate(model, prompt_token_ids, n, sampling, version)
    rewards = await scorer.score([(prompt, c.text) for c in completions])
    return RolloutGroup(
        tuple(
            Rollout(
                prompt=prompt,
                prompt_token_ids=prompt_token_ids,
                completion=c,
                reward=r,
                penalty=penalty(len(c.token_ids)),
            )
            for c, r in zip(completions, rewards, strict=True)
        )
    )


async def gather_all(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order; the first failure cancels the rest and is raised."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
