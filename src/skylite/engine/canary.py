"""The verification of sync: trainer and engine score the same fixed tokens under the adapter just loaded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from skylite.adapters.manifest import Canary, read_manifest
from skylite.data.tokenizer import ChatTokenizer
from skylite.errors import SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Prompt

DEFAULT_TOLERANCE = {"float32": 0.002, "bfloat16": 0.5}
"""Largest |trainer - engine| logprob of a canary token, from measured runs (docs/explanation/adapter-sync.md)."""
NUM_SEQUENCES = 2
MAX_TOKENS = 24
"""Short, because the trainer scores them at every publish: 2 x 24 tokens cost about as much as 2 completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """How an engine's canary compares with the trainer's."""

    gap_max: float
    """max |engine - policy|, nats."""
    gap_mean: float
    base_distance: float
    """mean |policy - base|, nats: how far the adapter has moved these tokens."""
    projection: float
    """<engine - base, policy - base> / |policy - base|^2: 1 for this adapter, 0 for the base; nan while policy == base."""

    def as_metrics(self) -> dict[str, float]:
        """Metric lines; the projection only where it is defined."""
        metrics = {
            "canary/gap_max": self.gap_max,
            "canary/gap_mean": self.gap_mean,
            "canary/base_distance": self.base_distance,
        }
        return metrics if math.isnan(self.projection) else metrics | {"canary/projection": self.projection}


def canary_sequences(tokenizer: ChatTokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Fixed token sequences out of the first prompts: [NUM_SEQUENCES][2..MAX_TOKENS] token ids."""
    texts = [f"{p.messages[-1]['content']}\n{p.answer}" for p in prompts[:NUM_SEQUENCES]]
    return [ids[:MAX_TOKENS] for ids in map(tokenizer.encode_text, texts) if len(ids) > 1]


def compare_logprobs(
    engine: Sequence[float], policy: Sequence[float], base: Sequence[float]
) -> CanaryReading:
    """Compare flat logprobs [N] of the engine with the trainer's, adapter on (policy) and off (base)."""
    gaps = [abs(e - p) for e, p in zip(engine, policy, strict=True)]
    moved = [p - b for p, b in zip(policy, base, strict=True)]
    energy = sum(d * d for d in moved)
    seen = sum((e - b) * d for e, b, d in zip(engine, base, moved, strict=True))
    return CanaryReading(
        gap_max=max(gaps),
        gap_mean=sum(gaps) / len(gaps),
        base_distance=sum(map(abs, moved)) / len(moved),
        projection=seen / energy if energy > 0 else math.nan,
    )


def check_reading(name: str, engine: str, reading: CanaryReading, tolerance: float) -> None:
    """Raise SyncFailed unless the engine samples this adapter and not the base.

    A distance to the base within the engines' own noise (`gap_mean`) shows nothing either way and is let pass.
    """
    if not reading.gap_max <= tolerance:
        raise SyncFailed(
            f"{engine} does not sample the adapter {name} that the trainer published: canary logprobs differ by up to "
            f"{reading.gap_max:.4f} (tolerance {tolerance:g}; the adapter is {reading.base_distance:.4f} from the base).",
            "The engine serves other weights than the trainer holds, or sync.canary_tolerance is too tight for this model.",
        )
    if reading.base_distance > 4 * reading.gap_mean and not 0.5 < reading.projection < 1.5:
        raise SyncFailed(
            f"{engine} answers as the frozen base and not as {name}: the canary moved {reading.projection:.2f} of the way "
            "from base to adapter (1.00 expected).",
            "The adapter's tensors were not applied; see the engine's log.",
        )


class LogprobScorer(Protocol):
    """What scores tokens (rollout.engine.Engine, rollout.client.VllmClient)."""

    @property
    def name(self) -> str: ...

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """[L - 1] logprobs of tokens 1.. of the sequence."""


async def verify(
    client: LogprobScorer, adapter: AdapterVersion, canary: Canary, tolerance: float
) -> CanaryReading:
    """Whether the engine samples what the trainer published. Raises SyncFailed."""
    reading = await read_canary(
        client, adapter, canary.sequences, canary.policy_logprobs, canary.base_logprobs
    )
    check_reading(adapter.name, client.name, reading, tolerance)
    return reading


async def verify_folder(client: LogprobScorer, adapter: AdapterVersion, tolerance: float) -> CanaryReading:
    """The same by the folder's own manifest. Raises ModelError when the weights were changed since they were published."""
    manifest = await asyncio.to_thread(read_manifest, adapter.path)
    return await verify(client, adapter, manifest.canary, tolerance)


async def read_canary(
    client: LogprobScorer,
    adapter: AdapterVersion,
    sequences: Sequence[Sequence[int]],
    policy: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
) -> CanaryReading:
    """Ask the engine for the canary's logprobs under the adapter's name and compare."""
    rows = await asyncio.gather(*(client.prompt_logprobs(adapter.name, ids) for ids in sequences))
    return compare_logprobs(
        [x for row in rows for x in row], [x for row in policy for x in row], [x for row in base for x in row]
    )
