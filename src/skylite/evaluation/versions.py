"""Evaluates many versions of an adapter, and the base, on one engine at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from skylite.engine.interface import BASE_NAME
from skylite.engine.retrying_engine import RetryingEngine
from skylite.environments.source import GroupRequest, RolloutSource, gather_or_cancel
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
class ProblemSet:
    """Problems, and the source that samples and scores them."""

    name: str
    prompts: Sequence[Prompt]
    source: RolloutSource


async def evaluate_subjects(
    engine: RetryingEngine,
    subjects: Sequence[Subject],
    problem_sets: Sequence[ProblemSet],
    n: int,
    *,
    max_loras: int,
    on_problem: Callable[[], None] = lambda: None,
    on_result: Callable[[Subject, ProblemSet, EvalResult], None],
) -> None:
    """Evaluate every subject on every problem set; `max_loras` adapters are loaded and sampled at once.

    `n`: trajectories of a problem. 1: greedy; more: at temperature 1.
    `on_result` is called as soon as a subject is done with a problem set.
    """

    async def one(subject: Subject, problems: ProblemSet) -> None:
        request = GroupRequest(
            model=subject.name,
            version=subject.version,
            engines=[engine],
            temperature=0.0 if n == 1 else 1.0,
            group_size=n,
        )
        result = await evaluate(problems.source, problems.prompts, request, on_problem)
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
