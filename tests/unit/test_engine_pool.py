"""All engines or none: the order of load, verification and unload, and the state after a failure."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import EnginePool
from skylite.errors import ModelError, SyncFailed
from skylite.run.run_dir import AdapterVersion
from skylite.types import EncodedPrompt
from tests.unit.engine_cases import BASE, POLICY, publish


class RecordingEngine:
    """Records requests, answers the canary of the loaded adapter and refuses the first `refuse` loads."""

    def __init__(
        self, name: str, events: list[str], refuse: int = 0, answers: Sequence[float] = POLICY
    ) -> None:
        self.name, self.events, self.refuse, self.answers = name, events, refuse, list(answers)

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        self.events.append(f"{self.name} load {adapter.version}")
        if self.refuse > 0:
            self.refuse -= 1
            raise SyncFailed(f"{self.name} refused adapter {adapter.name}: no slot")

    async def unload_adapter(self, name: str) -> None:
        self.events.append(f"{self.name} unload {int(name.removeprefix('policy-v'))}")

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        self.events.append(f"{self.name} canary {model.removeprefix('policy-v').lstrip('0') or '0'}")
        return BASE if model == "base" else self.answers


async def take(engines: EnginePool, adapter: AdapterVersion) -> CanaryReading:
    """What an on-policy step does: load, verify, unload the version before."""
    await engines.load(adapter)
    reading = await engines.verify(adapter)
    await engines.unload_before(before=adapter.version)
    return reading


def versions(engines: EnginePool) -> list[int]:
    return [a.version for a in engines.loaded]


def test_a_version_is_loaded_everywhere_and_verified_before_the_old_one_is_unloaded(tmp_path: Path) -> None:
    events: list[str] = []
    engines = EnginePool([RecordingEngine("a", events), RecordingEngine("b", events)], tolerance=0.002)  # type: ignore[list-item]
    asyncio.run(take(engines, publish(tmp_path, 0)))
    events.clear()
    reading = asyncio.run(take(engines, publish(tmp_path, 1)))
    assert events == ["a load 1", "b load 1", "a canary 1", "b canary 1", "a unload 0", "b unload 0"]
    assert reading.gap_max == 0.0
    assert versions(engines) == [1]


def test_a_refused_load_is_undone_on_the_other_engine_and_retried_once(tmp_path: Path) -> None:
    events: list[str] = []
    fakes: list[Any] = [RecordingEngine("a", events), RecordingEngine("b", events, refuse=1)]
    engines = EnginePool(fakes, tolerance=0.002)
    asyncio.run(take(engines, publish(tmp_path, 0)))
    assert events == [
        "a load 0",
        "b load 0",
        "a unload 0",
        "a load 0",
        "b load 0",
        "a canary 0",
        "a canary base",
        "b canary 0",
        "b canary base",
    ]


def test_a_second_refusal_fails_with_every_engine_on_the_old_version(tmp_path: Path) -> None:
    events: list[str] = []
    a, b = RecordingEngine("a", events), RecordingEngine("b", events)
    engines = EnginePool([a, b], tolerance=0.002)  # type: ignore[list-item]
    asyncio.run(take(engines, publish(tmp_path, 0)))
    events.clear()
    b.refuse = 2
    with pytest.raises(SyncFailed, match="b refused adapter policy-v000001: no slot"):
        asyncio.run(take(engines, publish(tmp_path, 1)))
    assert events == ["a load 1", "b load 1", "a unload 1", "a load 1", "b load 1", "a unload 1"]
    assert versions(engines) == [0]


def test_an_engine_that_serves_the_base_fails_the_sync_and_keeps_the_old_version(tmp_path: Path) -> None:
    events: list[str] = []
    a, b = RecordingEngine("a", events), RecordingEngine("b", events)
    engines = EnginePool([a, b], tolerance=0.002)  # type: ignore[list-item]
    asyncio.run(take(engines, publish(tmp_path, 0)))
    b.answers = BASE
    events.clear()
    with pytest.raises(SyncFailed, match="b does not sample from the adapter policy-v000001"):
        asyncio.run(take(engines, publish(tmp_path, 1)))
    assert events[-2:] == ["a unload 1", "b unload 1"]
    assert versions(engines) == [0]


def test_weights_changed_after_publishing_never_pass_verification(tmp_path: Path) -> None:
    events: list[str] = []
    engines = EnginePool([RecordingEngine("a", events)], tolerance=0.002)  # type: ignore[list-item]
    adapter = publish(tmp_path, 0)
    adapter.weights_path.write_bytes(b"weights X")
    with pytest.raises(ModelError, match="sha256"):
        asyncio.run(take(engines, adapter))
    assert events == ["a load 0", "a unload 0"]
    assert versions(engines) == []


def test_the_old_version_stays_until_it_is_retired(tmp_path: Path) -> None:
    events: list[str] = []
    engines = EnginePool([RecordingEngine("a", events)], tolerance=0.002)  # type: ignore[list-item]
    asyncio.run(take(engines, publish(tmp_path, 0)))
    asyncio.run(engines.load(publish(tmp_path, 1)))
    assert (versions(engines), events[-1]) == ([0, 1], "a load 1")
    assert [a.version for a in asyncio.run(engines.unload_before(before=1))] == [0]
    assert (versions(engines), events[-1]) == ([1], "a unload 0")
