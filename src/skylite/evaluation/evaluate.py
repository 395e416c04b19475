"""pass@1 of a served model on prepared problems."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq

from skylite.engine.client import Sampling
from skylite.engine.collect import Scorer, collect_group, gather_all, request_seed
from skylite.engine.engine import Engine
from skylite.errors import no_finite_score
from skylite.evaluation.interval import Accuracy, accuracy_of
from skylite.run.files import atomic_file
from skylite.types import Prompt, RolloutGroup, is_number

MAX_REQUESTS_IN_FLIGHT = 64


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalResult:
    """Scores of one served model on one set of problems."""

    model: str
    temperature: float
    accuracy: Accuracy
    completion_tokens_mean: float
    truncated_frac: float
    groups: Sequence[RolloutGroup]


async def evaluate(
    clients: Sequence[Engine],
    model: str,
    version: int,
    prompts: Sequence[Prompt],
    token_ids: dict[str, list[int]],
    scorer: Scorer,
    *,
    n: int,
    temperature: float,
    max_tokens: int,
    stop_token_ids: tuple[int, ...],
    seed: int,
) -> EvalResult:
    """Sample `n` completions a problem (temperature 0: greedy) from `model` and score them.

    Raises RunFailed with the problem's id for a score that is NaN or infinite: no accuracy can be made of it.
    """
    slots = asyncio.Semaphore(MAX_REQUESTS_IN_FLIGHT)

    async def one(index: int, prompt: Prompt) -> RolloutGroup:
        sampling = Sampling(
            temperature=temperature, top_p=1.0, top_k=0, max_tokens=max_tokens, stop_token_ids=stop_token_ids,
            seed=request_seed(seed, -1, index),
        )  # fmt: skip
        async with slots:
            group = await collect_group(
                clients[index % len(clients)],
                model,
                version,
                prompt,
                token_ids[prompt.id],
                n,
                sampling,
                scorer,
            )
        for r in group.rollouts:
            if not is_number(r.reward):
                raise no_finite_score(r.reward, prompt.id, r.completion.text)
        return group

    groups = await gather_all([asyncio.create_task(one(i, p)) for i, p in enumerate(prompts)])
    completions = [r.completion for g in groups for r in g.rollouts]
    return EvalResult(
        model=model,
        temperature=temperature,
        accuracy=accuracy_of([[r.reward for r in g.rollouts] for g in groups]),
        completion_tokens_mean=sum(len(c.token_ids) for c in completions) / len(completions),
        truncated_frac=sum(c.finish_reason == "length" for c in completions) / len(completions),
        groups=groups,
    )


def write_results(path: Path, result: EvalResult) -> None:
    """One row a completion: problem, what was said, its score."""
    rows = [
        {
            "prompt_id": r.prompt.id,
            "difficulty": r.prompt.difficulty,
            "question": r.prompt.messages[-1]["content"],
            "answer": r.prompt.answer,
            "completion": r.completion.text,
            "reward": r.reward,
            "tokens": len(r.completion.token_ids),
            "finish_reason": r.completion.finish_reason,
            "model": result.model,
            "temperature": result.temperature,
        }
        for g in result.groups
        for r in g.rollouts
    ]
    table = pa.Table.from_pylist(rows)
    with atomic_file(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, compression="zstd")
