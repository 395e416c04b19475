"""Verifies an adapter sync: trainer and engine score the same fixed tokens with the adapter just loaded."""

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
"""Largest |trainer - engine| logprob of a canary token in nats (docs/explanation/adapter-sync.md)."""
NUM_SEQUENCES = 2
MAX_TOKENS = 24
"""Short, because the trainer scores all sequences at every publish."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """The logprobs of an engine on the canary, compared with the trainer's."""

    gap_max: float
    """max |engine - policy| in nats."""
    gap_mean: float
    base_distance: float
    """mean |policy - base| in nats: how far the adapter has moved from the base."""
    projection: float
    """<engine - base, policy - base> / |policy - base|^2: 1 for this adapter, 0 for the base.

    NaN while policy == base.
    """

    def as_metrics(self) -> dict[str, float]:
        """The reading as metrics; the projection only if it is defined."""
        metrics = {
            "canary/gap_max": self.gap_max,
            "canary/gap_mean": self.gap_mean,
            "canary/base_distance": self.base_distance,
        }
        return metrics if math.isnan(self.projection) else metrics | {"canary/projection": self.projection}


def canary_sequences(tokenizer: ChatTokenizer, prompts: Sequence[Prompt]) -> list[list[int]]:
    """Fixed sequences made from the first prompts: [NUM_SEQUENCES][2..MAX_TOKENS] token ids."""
    texts = [f"{p.messages[-1]['content']}\n{p.answer}" for p in prompts[:NUM_SEQUENCES]]
    return [ids[:MAX_TOKENS] for ids in map(tokenizer.encode_text, texts) if len(ids) > 1]


def compare_logprobs(
    engine: Sequence[float], policy: Sequence[float], base: Sequence[float]
) -> CanaryReading:
    """Compare the engine's logprobs [N] with the trainer's for the policy and for the base (adapter off)."""
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
    """Raise SyncFailed unless the engine samples from this adapter and not from the base.

    If the adapter's distance to the base is within the noise (4 * `gap_mean`), the projection means nothing
    and is not checked.
    """
    if not reading.gap_max <= tolerance:
        raise SyncFailed(
            f"{engine} does not sample from the adapter {name} that the trainer published: canary logprobs "
            f"differ by up to {reading.gap_max:.4f} (tolerance {tolerance:g}; "
            f"the adapter is {reading.base_distance:.4f} from the base).",
            "The engine serves other weights than the trainer's, or sync.canary_tolerance is too small.",
        )
    if reading.base_distance > 4 * reading.gap_mean and not 0.5 < reading.projection < 1.5:
        raise SyncFailed(
            f"{engine} answers as the frozen base and not as {name}: its canary logprobs moved "
            f"{reading.projection:.2f} of the way from base to adapter (expected 1.00).",
            "The adapter's tensors were not applied. Read the engine's log.",
        )


class LogprobScorer(Protocol):
    """Scores tokens: engine.engine.Engine or engine.client.VllmClient."""

    @property
    def name(self) -> str: ...

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """[L - 1] logprobs in nats of all tokens of the sequence but the first."""


async def verify(
    client: LogprobScorer, adapter: AdapterVersion, canary: Canary, tolerance: float
) -> CanaryReading:
    """Verify that the engine samples from what the trainer published. Raises SyncFailed."""
    reading = await read_canary(
        client, adapter, canary.sequences, canary.policy_logprobs, canary.base_logprobs
    )
    check_reading(adapter.name, client.name, reading, tolerance)
    return reading


async def verify_folder(client: LogprobScorer, adapter: AdapterVersion, tolerance: float) -> CanaryReading:
    """The same with the canary in the folder's manifest.

    Raises ModelError if the weights changed after publishing.
    """
    manifest = await asyncio.to_thread(read_manifest, adapter.path)
    return await verify(client, adapter, manifest.canary, tolerance)


async def read_canary(
    client: LogprobScorer,
    adapter: AdapterVersion,
    sequences: Sequence[Sequence[int]],
    policy: Sequence[Sequence[float]],
    base: Sequence[Sequence[float]],
) -> CanaryReading:
    """Let the engine score the canary with the adapter, and compare."""
    rows = await asyncio.gather(*(client.prompt_logprobs(adapter.name, ids) for ids in sequences))
    return compare_logprobs(
        [x for row in rows for x in row], [x for row in policy for x in row], [x for row in base for x in row]
    )
