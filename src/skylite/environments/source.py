"""What a rollout source is: it turns prompts into groups.

SingleTurn (single_turn.py) asks the engine once for all completions of a prompt. Episodes
(episodes_source.py) lets programs talk to the engine. Offline (offline_source.py) takes prepared replies.
rollout/sources.py chooses and starts one.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeVar

from skylite.engine.interface import Sampling
from skylite.types import Call, EncodedPrompt, Group, Prompt

T = TypeVar("T")
EVAL_STEP = -1
"""Takes the place of a step in the seeds of an evaluation."""
OnGroup = Callable[[Group | None], None]


class Sampler(Protocol):
    """What replies are sampled from: an engine of the run, or scripted_engine.py."""

    tokens_in_flight: int
    """At most, of the groups that are sampled here now."""

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        """`n` completions of one prompt."""

    def lost_s(self) -> float:
        """Seconds so far in which it could not answer, which no episode is to blame for."""


@dataclass(frozen=True, slots=True, kw_only=True)
class GroupRequest:
    """What the groups are sampled from, how large they are, and their place in the run."""

    model: str
    """Name of the adapter, or of the base, in requests to the engines."""
    version: int
    engines: Sequence[Sampler]
    """Each gets the next group when it has the fewest tokens in flight."""
    temperature: float
    group_size: int = 1
    step: int = EVAL_STEP
    first_index: int = 0
    """Number of the first prompt within the step. Step and number decide the seeds."""

    @contextmanager
    def engine(self, tokens: int) -> Iterator[Sampler]:
        """The engine of a group, of at most so many tokens, until its end: it computes the prompt once."""
        engine = min(self.engines, key=lambda engine: engine.tokens_in_flight)
        engine.tokens_in_flight += tokens
        try:
            yield engine
        finally:
            engine.tokens_in_flight -= tokens


class RolloutSource(Protocol):
    """Turns prompts into groups."""

    async def sample(
        self, prompts: Sequence[Prompt], request: GroupRequest, on_group: OnGroup = lambda _: None
    ) -> list[Group]:
        """One group a prompt, in order, without the groups that env.on_error=drop leaves out.

        `on_group` gets each group at its end, and None for one that is left out; what it raises ends the
        sampling.
        """


def request_seed(seed: int, step: int, index: int) -> int:
    """The seed of a request: a hash of run seed, step and prompt index.

    Call i uses seed + i, so the seeds of two requests must be far apart.
    """
    digest = hashlib.sha256(f"{seed}/{step}/{index}".encode()).digest()
    return int.from_bytes(digest[:6], "big")


def named_step(step: int) -> str:
    """The step of a request, for a message."""
    return "the evaluation" if step == EVAL_STEP else f"step {step}"


async def gather_or_cancel(tasks: Sequence[asyncio.Task[T]]) -> list[T]:
    """Results in order. The first failure cancels the other tasks and is raised."""
    try:
        return list(await asyncio.gather(*tasks))
    finally:
        for task in tasks:
            task.cancel()
