"""Sizes of the training steps of `make gpu-check`, and their random rollouts."""

from __future__ import annotations

import random
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skylite.types import Group


@dataclass(frozen=True, slots=True)
class Sizes:
    """A step. Completion lengths are log-normal: most are short, some reach the longest."""

    prompts: int
    group_size: int
    prompt: int
    median: int
    longest: int
    budget: int
    vocab: int


REAL = Sizes(prompts=8, group_size=8, prompt=256, median=400, longest=2048, budget=16384, vocab=20000)
TINY = Sizes(prompts=2, group_size=2, prompt=8, median=8, longest=20, budget=256, vocab=500)
BUDGETS = {"qwen2.5-7b": 8192}
"""By shape, where REAL's would need more than the 80 GB of an H100 without checkpointing."""


def sizes_of(shape: str, dry_run: bool) -> tuple[str, Sizes]:
    """The shape to build, and its steps."""
    return ("tiny", TINY) if dry_run else (shape, replace(REAL, budget=BUDGETS.get(shape, REAL.budget)))


def varied_groups(sizes: Sizes, seed: int) -> list[Group]:
    """Groups of random tokens with varied lengths. One trajectory of each group has reward 1."""
    from tests.rows import Row, groups_of

    rng = random.Random(seed)

    def tokens(count: int) -> list[int]:
        return [rng.randrange(sizes.vocab) for _ in range(count)]

    rows = []
    for group in range(sizes.prompts):
        prompt = tokens(max(1, round(sizes.prompt * rng.uniform(0.5, 1.5))))
        for index in range(sizes.group_size):
            length = min(sizes.longest, max(1, round(sizes.median * rng.lognormvariate(0, 0.7))))
            row = Row(
                group=group,
                prompt_token_ids=prompt,
                completion_token_ids=tokens(length),
                rollout_logprobs=[-10.0] * length,
                reward=float(index == 0),
            )
            rows.append(row)
    return groups_of(rows)
