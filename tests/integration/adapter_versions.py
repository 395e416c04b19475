"""Random adapters on a vLLM server, and how far two answers differ."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import count
from pathlib import Path

import httpx

from tests.engines import (
    TARGET_MODULES,
    Answer,
    EngineServer,
    write_random_adapter,
)

FLOAT_NOISE = 1e-4
DIFFERENT = 1e-2
PROMPT = list(
    b"Natalia sold clips to 48 of her friends in April, and then she sold half as many in May. "
    b"How many in all?"
)
_NUMBERS = count()


@dataclass(frozen=True, slots=True)
class Version:
    """A loaded adapter."""

    name: str
    path: Path


def publish(
    server: EngineServer,
    folder: Path,
    *,
    seed: int,
    rank: int = 4,
    target_modules: list[str] = TARGET_MODULES,
) -> Version:
    """Write a random adapter and load it under a name that this session has not used."""
    path = write_random_adapter(
        folder / f"seed{seed}", server.model_path, seed=seed, rank=rank, target_modules=target_modules
    )
    version = Version(f"policy-{next(_NUMBERS)}", path)
    assert server.load(version.name, version.path).status_code == httpx.codes.OK
    return version


def gap(one: Answer, other: Answer) -> float:
    """Largest difference of two answers' logprobs up to the first token that differs."""
    pairs = zip(one.token_ids, other.token_ids, one.logprobs, other.logprobs, strict=True)
    worst = 0.0
    for token, other_token, logprob, other_logprob in pairs:
        worst = max(worst, abs(logprob - other_logprob))
        if token != other_token:
            break
    return worst


def same(one: Answer, other: Answer) -> bool:
    return one.token_ids == other.token_ids and gap(one, other) < FLOAT_NOISE
