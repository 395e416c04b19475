"""Verifies an adapter sync: trainer and engine score the same fixed tokens with the adapter just loaded."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from skylite.adapters.manifest import SEQUENCES_PER_VERSION, Canary, read_manifest
from skylite.data.chat_tokenizer import ChatTokenizer
from skylite.data.images import picture
from skylite.engine.canary_kinds import check_kinds, explained_by, read_kinds
from skylite.engine.canary_limits_bf16 import (
    MAX_VISIBLE,
    Scores,
    check_paired,
    joined,
    read_paired,
    read_together,
)
from skylite.engine.canary_limits_float32 import check_float32, read_float32
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.interface import BASE_NAME, Engine
from skylite.errors import SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import IMAGE, ImageTokens, Prompt

DEFAULT_TOLERANCE = {"float32": 0.002, "bfloat16": None}
"""Largest |trainer - engine| logprob of a canary token in nats; None: the rule of canary_limits_bf16.py.

In float32 the noise sets much lower limits (canary_limits_float32.py). This one also holds for the noise
itself."""
NUM_SEQUENCES = {"float32": SEQUENCES_PER_VERSION, "bfloat16": 24}
"""In bfloat16 the versions take turns: rounding hides an adapter's first moves in few tokens."""
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


def with_picture(
    tokenizer: ChatTokenizer, sequences: Sequence[Sequence[int]]
) -> tuple[list[list[int]], ImageTokens]:
    """The sequences with a picture before their first token: they show an adapter on what reads images."""
    asked = Prompt(
        id="canary", messages=[{"role": "user", "content": IMAGE}], answer="", source="", images=(picture(),)
    )
    [found] = tokenizer.encode([asked])
    image = found.images[0]
    # From the token before it, which is the context of the first, to the one behind it.
    begin, end = image.start - 1, image.start + image.length + 1
    prefix = list(found.token_ids[begin:end])
    return [[*prefix, *ids] for ids in sequences], replace(image, start=1)


CanaryTokens = tuple[int, ...]
"""Token ids of a canary sequence."""
Row = Sequence[float]
"""[L - 1] logprobs of all tokens of a sequence but the first."""


@dataclass(slots=True)
class EarlierAnswers:
    """What an engine answered to earlier canaries. Asking again would double its work."""

    base: dict[CanaryTokens, Row] = field(default_factory=dict)
    """With the base, which never changes."""
    before: dict[CanaryTokens, Scores] = field(default_factory=dict)
    """With the version verified before."""
    newest: dict[CanaryTokens, Scores] = field(default_factory=dict)
    """With the newest version that scored the sequence and differs from the base."""


async def verify(
    client: Engine,
    adapter: AdapterVersion,
    canary: Canary,
    tolerance: float | None,
    earlier: EarlierAnswers | None = None,
) -> CanaryReading:
    """Verify that the engine samples from what the trainer published. Raises SyncFailed.

    Args:
        tolerance: None for the rule of canary_limits_bf16.py.
        earlier: answers of this engine. Those to this canary are added.
    """
    earlier = earlier or EarlierAnswers()
    now = await _score_all(client, adapter.name, canary, earlier)
    judged = now if tolerance is not None else _with_newest(now, earlier)
    kinds = read_kinds(judged.values())
    try:
        if tolerance is None:
            reading = _check_paired(client, adapter, now, judged)
        else:
            found = read_float32(joined(now.values()))
            check_float32(adapter.name, client.name, found, tolerance)
            reading = found.reading
    except SyncFailed as error:
        raise SyncFailed(f"{error.what} {explained_by(kinds)}".strip(), error.hint) from None
    check_kinds(adapter.name, client.name, kinds)
    earlier.before, earlier.newest = now, judged
    return replace(reading, kinds=kinds)


async def verify_folder(client: Engine, adapter: AdapterVersion, tolerance: float | None) -> CanaryReading:
    """The same with the canary in the folder's manifest.

    Raises ModelError if the weights changed after publishing.
    """
    manifest = await asyncio.to_thread(read_manifest, adapter.path)
    return await verify(client, adapter, manifest.canary, tolerance)


def _check_paired(
    client: Engine,
    adapter: AdapterVersion,
    now: dict[CanaryTokens, Scores],
    together: dict[CanaryTokens, Scores],
) -> CanaryReading:
    found, found_together = read_paired(joined(now.values())), read_together((together or now).values())
    check_paired(adapter.name, client.name, found)
    check_paired(f"{adapter.name} (judged with the versions before it)", client.name, found_together)
    return replace(
        found.reading,
        projection=found_together.reading.projection,
        projection_error=found_together.reading.projection_error,
        visible=found_together.projection_limit,
        is_verified=found.is_told_apart and found_together.projection_limit <= MAX_VISIBLE,
    )


def _with_newest(now: dict[CanaryTokens, Scores], earlier: EarlierAnswers) -> dict[CanaryTokens, Scores]:
    return earlier.newest | {ids: scores for ids, scores in now.items() if scores.policy != scores.base}


async def _score_all(
    client: Engine, name: str, canary: Canary, earlier: EarlierAnswers
) -> dict[CanaryTokens, Scores]:
    """Scores by sequence. What an engine computes together rounds in other ways, so it gets one at a time.

    The base must be alone for another reason, too: some kernels apply an adapter to the base's requests in
    the same batch. The first canary of an engine comes before any sampling.
    """
    found = {}
    pairs = zip(canary.sequences, canary.policy_logprobs, canary.base_logprobs, strict=True)
    for index, (sequence, policy, base) in enumerate(pairs):
        ids = tuple(sequence)
        prompt = canary.prompt(ids)
        engine = await client.score(name, prompt)
        if ids not in earlier.base:
            earlier.base[ids] = await client.score(BASE_NAME, prompt)
        before = earlier.before.get(ids)
        found[ids] = Scores(
            engine=engine,
            engine_base=earlier.base[ids],
            policy=policy,
            base=base,
            engine_before=before.engine if before else None,
            policy_before=before.policy if before else None,
            effects={kind: rows[index] for kind, rows in canary.effects.items()},
        )
    return found
