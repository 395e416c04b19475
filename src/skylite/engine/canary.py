"""Verifies an adapter sync: trainer and engine score the same fixed tokens with the adapter just loaded."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

from skylite.adapters.manifest import SHORT_CANARY, Canary, read_manifest
from skylite.data.tokenizer import ChatTokenizer
from skylite.engine.canary_bf16 import Scores, check_paired, read_paired
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.server_command import BASE_NAME
from skylite.errors import SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import Prompt

DEFAULT_TOLERANCE = {"float32": 0.002, "bfloat16": None}
"""Largest |trainer - engine| logprob of a canary token in nats; None: the rule of canary_bf16.py."""
NUM_SEQUENCES = {"float32": SHORT_CANARY, "bfloat16": 24}
"""Rounding hides a bfloat16 adapter's first moves in few tokens."""
MAX_TOKENS = 24
"""Short, because every publish waits for the canary."""


def canary_sequences(tokenizer: ChatTokenizer, prompts: Sequence[Prompt], dtype: str) -> list[list[int]]:
    """Fixed, distinct sequences from the first prompts: [NUM_SEQUENCES][2..MAX_TOKENS] token ids.

    If the prompts begin with the same text, the sequences also come from later parts: the rounding errors of
    equal sequences are equal, and do not average out. Short prompts may give fewer sequences.
    """
    texts = [f"{p.messages[-1]['content']}\n{p.answer}" for p in prompts[: NUM_SEQUENCES[dtype]]]
    encoded = tokenizer.encode_texts(texts)
    found: dict[tuple[int, ...], None] = {}
    for start in _starts(max(map(len, encoded))):
        parts = [tuple(ids[start : start + MAX_TOKENS]) for ids in encoded]
        found.update(dict.fromkeys(part for part in parts if len(part) > 1))
        if len(found) >= NUM_SEQUENCES[dtype]:
            break
    return [list(part) for part in found][: NUM_SEQUENCES[dtype]]


def _starts(length: int) -> Iterator[int]:
    """Where sequences begin in a text: first side by side, then with more and more overlap."""
    for step in (MAX_TOKENS, MAX_TOKENS // 2, MAX_TOKENS // 4):
        yield from range(0, length, step)


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
    """Scores tokens: engine.retrying_client.Engine or engine.client.VllmClient."""

    @property
    def name(self) -> str: ...

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        """[L - 1] logprobs in nats of all tokens of the sequence but the first."""


Batch = tuple[tuple[int, ...], ...]
"""Token ids of sequences scored at once: how an engine rounds depends on what it computes together."""
Rows = Sequence[Sequence[float]]
"""[S][L - 1] logprobs of all tokens of a batch's sequences but each first."""
T = TypeVar("T")


@dataclass(slots=True)
class EarlierAnswers:
    """What an engine answered to earlier canaries. Asking again would double its work."""

    base: dict[Batch, Rows] = field(default_factory=dict)
    """With the base, which never changes."""
    before: dict[Batch, Rows] = field(default_factory=dict)
    """With the version verified before."""
    policy_before: dict[Batch, Rows] = field(default_factory=dict)
    """The trainer's of that version."""


async def verify(
    client: LogprobScorer,
    adapter: AdapterVersion,
    canary: Canary,
    tolerance: float | None,
    earlier: EarlierAnswers | None = None,
) -> CanaryReading:
    """Verify that the engine samples from what the trainer published. Raises SyncFailed.

    Args:
        tolerance: None for the rule of canary_bf16.py.
        earlier: answers of this engine. Those to this canary are added.
    """
    if tolerance is None:
        return await _verify_paired(client, adapter, canary, earlier or EarlierAnswers())
    engine = _flat(await _score(client, adapter.name, canary.sequences))
    reading = compare_logprobs(engine, _flat(canary.policy_logprobs), _flat(canary.base_logprobs))
    check_reading(adapter.name, client.name, reading, tolerance)
    return reading


async def verify_folder(
    client: LogprobScorer, adapter: AdapterVersion, tolerance: float | None
) -> CanaryReading:
    """The same with the canary in the folder's manifest.

    Raises ModelError if the weights changed after publishing.
    """
    manifest = await asyncio.to_thread(read_manifest, adapter.path)
    return await verify(client, adapter, manifest.canary, tolerance)


async def _verify_paired(
    client: LogprobScorer, adapter: AdapterVersion, canary: Canary, earlier: EarlierAnswers
) -> CanaryReading:
    batches: list[Batch] = [tuple(map(tuple, part)) for part in _parts(canary.sequences)]
    engine = {batch: await _score(client, adapter.name, batch) for batch in batches}
    for batch in batches:
        if batch not in earlier.base:
            earlier.base[batch] = await _score(client, BASE_NAME, batch)
    shared = [batch for batch in batches if batch in earlier.before]
    found = read_paired(
        Scores(
            engine=_joined(engine, batches),
            engine_base=_joined(earlier.base, batches),
            policy=_flat(canary.policy_logprobs),
            base=_flat(canary.base_logprobs),
            engine_before=_joined(earlier.before, shared) or None,
            policy_before=_joined(earlier.policy_before, shared) or None,
        )
    )
    check_paired(adapter.name, client.name, found)
    earlier.before = engine
    earlier.policy_before = dict(zip(batches, _parts(canary.policy_logprobs), strict=True))
    return found.reading


async def _score(client: LogprobScorer, model: str, sequences: Sequence[Sequence[int]]) -> Rows:
    """The engine's logprobs of all tokens of all sequences but each first."""
    return await asyncio.gather(*(client.prompt_logprobs(model, ids) for ids in sequences))


def _parts(rows: Sequence[T]) -> list[Sequence[T]]:
    """The short canary, which every version has, and the rest, if there is one."""
    return [part for part in (rows[:SHORT_CANARY], rows[SHORT_CANARY:]) if part]


def _joined(rows: Mapping[Batch, Rows], batches: Sequence[Batch]) -> list[float]:
    return [x for batch in batches for x in _flat(rows[batch])]


def _flat(rows: Rows) -> list[float]:
    return [x for row in rows for x in row]
