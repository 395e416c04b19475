"""Evaluates many versions of an adapter, and the base, on one engine at once.

Problems are one completion each (OneTurnProblems) or episodes of an environment (EpisodeProblems).
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

from skylite.engine.collect_groups import Scorer, gather_or_cancel
from skylite.engine.retrying_client import Engine
from skylite.engine.vllm.server_command import BASE_NAME
from skylite.environments.sample_episodes import Environment, Source
from skylite.evaluation.episodes import evaluate_episodes
from skylite.evaluation.evaluate import EvalResult, evaluate
from skylite.run.run_dir import AdapterVersion
from skylite.types import Prompt


@dataclass(frozen=True, slots=True)
class Subject:
    """What is evaluated: an adapter version, or the base model."""

    adapter: AdapterVersion | None

    @property
    def name(self) -> str:
        """The model name in requests to the engine, and the name of the results."""
        return BASE_NAME if self.adapter is None else self.adapter.name

    @property
    def version(self) -> int:
        return 0 if self.adapter is None else self.adapter.version


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalSampling:
    """How completions are sampled."""

    n: int
    """Completions or episodes per problem. 1: greedy; more: at temperature 1."""
    max_tokens: int
    stop_token_ids: tuple[int, ...]
    stop: tuple[str, ...] = ()
    """Texts that end a completion."""
    seed: int

    @property
    def temperature(self) -> float:
        return 0.0 if self.n == 1 else 1.0


class ProblemSet(Protocol):
    """Problems, and what samples and scores them."""

    @property
    def name(self) -> str: ...

    async def evaluate(
        self, engine: Engine, subject: Subject, sampling: EvalSampling, on_problem: Callable[[], None]
    ) -> EvalResult:
        """The scores of a loaded subject. Raises RunFailed for a NaN or infinite score."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class OneTurnProblems:
    """Encoded prompts, and the reward that scores the completions."""

    name: str
    prompts: Sequence[Prompt]
    token_ids: dict[str, list[int]]
    """Prompt id -> prompt token ids."""
    scorer: Scorer

    async def evaluate(
        self, engine: Engine, subject: Subject, sampling: EvalSampling, on_problem: Callable[[], None]
    ) -> EvalResult:
        return await evaluate(
            [engine],
            subject.name,
            subject.version,
            self.prompts,
            self.token_ids,
            self.scorer,
            n=sampling.n,
            temperature=sampling.temperature,
            max_tokens=sampling.max_tokens,
            stop_token_ids=sampling.stop_token_ids,
            stop=sampling.stop,
            seed=sampling.seed,
            on_problem=on_problem,
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class EpisodeProblems:
    """Tasks of an environment. Its episodes score themselves; its config holds their limits and the seed."""

    name: str
    prompts: Sequence[Prompt]
    environment: Environment

    async def evaluate(
        self, engine: Engine, subject: Subject, sampling: EvalSampling, on_problem: Callable[[], None]
    ) -> EvalResult:
        source = Source(
            model=subject.name,
            version=subject.version,
            engines=[engine],
            temperature=sampling.temperature,
        )
        return await evaluate_episodes(self.environment, source, self.prompts, sampling.n, on_problem)


async def evaluate_subjects(
    engine: Engine,
    subjects: Sequence[Subject],
    problem_sets: Sequence[ProblemSet],
    sampling: EvalSampling,
    *,
    max_loras: int,
    on_problem: Callable[[], None] = lambda: None,
    on_result: Callable[[Subject, ProblemSet, EvalResult], None],
) -> None:
    """Evaluate every subject on every problem set; `max_loras` adapters are loaded and sampled at once.

    `on_result` is called as soon as a subject is done with a problem set.
    """

    async def one(subject: Subject, problems: ProblemSet) -> None:
        result = await problems.evaluate(engine, subject, sampling, on_problem)
        on_result(subject, problems, result)

    for wave in waves(subjects, max_loras):
        adapters = [subject.adapter for subject in wave if subject.adapter is not None]
        for adapter in adapters:
            await engine.load_adapter(adapter)
        await gather_or_cancel([asyncio.create_task(one(s, p)) for s in wave for p in problem_sets])
        for adapter in adapters:
            await engine.unload_adapter(adapter.name)


def waves(subjects: Sequence[Subject], max_loras: int) -> Iterator[list[Subject]]:
    """Subjects in order, in parts with at most `max_loras` adapters; the base needs no place."""
    wave: list[Subject] = []
    for subject in subjects:
        if subject.adapter is not None and sum(s.adapter is not None for s in wave) == max_loras:
            yield wave
            wave = []
        wave.append(subject)
    if wave:
        yield wave
