"""The bfloat16 canary in a pool of engines: what it asks for, and an engine that serves other weights."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path

import pytest

from skylite.adapters.manifest import SHORT_CANARY, Canary, read_manifest
from skylite.engine.canary_bf16 import Scores
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import EnginePool
from skylite.errors import SyncFailed
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion
from tests.unit.engine_cases import publish
from tests.unit.test_canary_bf16 import N, scores


class PairedEngine:
    """Answers with stored scores by model name."""

    name = "vllm-0"

    def __init__(self, answers: dict[str, Sequence[float]]) -> None:
        self.answers, self.asked = answers, list[str]()

    async def load_adapter(self, adapter: AdapterVersion) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
        self.asked.append(model)
        return list(self.answers[model])


def with_canary(adapter: AdapterVersion, found: Scores) -> AdapterVersion:
    canary = Canary(
        sequences=[list(range(N + 1))], policy_logprobs=[list(found.policy)], base_logprobs=[list(found.base)]
    )
    manifest = read_manifest(adapter.path).model_copy(update={"canary": canary})
    write_json(adapter.manifest_path, manifest.model_dump(mode="json"))
    return adapter


def test_an_engine_is_asked_once_for_each_version_and_once_for_the_base(tmp_path: Path) -> None:
    older, newer = (scores(0, size, lambda move, _: move) for size in (0.1, 0.12))
    engine = PairedEngine(
        {"base": older.engine_base, "policy-v000001": older.engine, "policy-v000002": newer.engine}
    )
    pool = EnginePool([engine], tolerance=None)  # type: ignore[list-item]

    async def take(version: int, found: Scores) -> CanaryReading:
        adapter = with_canary(publish(tmp_path, version), found)
        await pool.load(adapter)
        return await pool.verify(adapter)

    asyncio.run(take(1, older))
    assert engine.asked == ["policy-v000001", "base"]
    reading = asyncio.run(take(2, newer))
    assert engine.asked[2:] == ["policy-v000002"]
    assert reading.as_metrics()["canary/rounding"] == pytest.approx(reading.rounding)
    assert pool.loaded[-1].version == 2
    engine.answers["policy-v000003"] = newer.engine
    with pytest.raises(SyncFailed, match="logprobs are those of the version before"):
        asyncio.run(take(3, scores(0, 0.14, lambda move, _: move)))


def test_a_full_canary_after_a_short_one_is_compared_on_what_both_have(tmp_path: Path) -> None:
    asked: list[tuple[str, int]] = []

    class Scoring(PairedEngine):
        async def prompt_logprobs(self, model: str, token_ids: Sequence[int]) -> list[float]:
            asked.append((model, token_ids[0]))
            return [x - token_ids[0] for x in self.answers[model]]

    engine = Scoring({"base": [-2.0, -2.5], "policy-v000001": [-2.1, -2.6], "policy-v000002": [-2.1, -2.6]})
    pool = EnginePool([engine], tolerance=None)  # type: ignore[list-item]
    short, full = range(SHORT_CANARY), range(SHORT_CANARY + 2)

    def canary(policy: list[float], firsts: range) -> Canary:
        return Canary(
            sequences=[[first, 5, 6] for first in firsts],
            policy_logprobs=[[x - first for x in policy] for first in firsts],
            base_logprobs=[[x - first for x in (-2.0, -2.5)] for first in firsts],
        )

    async def take(version: int, found: Canary) -> None:
        adapter = publish(tmp_path, version)
        manifest = read_manifest(adapter.path).model_copy(update={"canary": found})
        write_json(adapter.manifest_path, manifest.model_dump(mode="json"))
        await pool.load(adapter)
        await pool.verify(adapter)

    asyncio.run(take(1, canary([-2.1, -2.6], short)))
    assert [first for model, first in asked if model == "base"] == list(short)
    with pytest.raises(SyncFailed, match="100% of the canary logprobs are those of the version before"):
        asyncio.run(take(2, canary([-2.2, -2.7], full)))
    assert [first for model, first in asked if model == "base"] == list(full)
    assert [first for model, first in asked if model == "policy-v000001"] == list(short)
