"""The bfloat16 canary in a pool of engines: what it asks for, and an engine that serves other weights."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from skylite.adapters.manifest import Canary, read_manifest
from skylite.engine.canary import Row
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import EnginePool
from skylite.errors import SyncFailed
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion
from skylite.trainer.canary import sequences_of
from tests.unit.canary_cases import scores
from tests.unit.engine_cases import publish


class Scoring:
    """Answers the sequence [first, ...] with `answer(model, first)`, and notes what it was asked."""

    name = "engine-0"

    def __init__(self, answer: Callable[[str, int], list[float]]) -> None:
        self.answer, self.asked = answer, list[tuple[str, int]]()

    async def load_adapter(self, adapter: AdapterVersion) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def score(self, model: str, token_ids: Sequence[int]) -> list[float]:
        self.asked.append((model, token_ids[0]))
        return self.answer(model, token_ids[0])


def take(pool: EnginePool, folder: Path, version: int, policy: dict[int, Row], base: Row) -> CanaryReading:
    """Load and verify a version whose canary has a sequence for each key of `policy`."""
    adapter = publish(folder, version)
    canary = Canary(
        sequences=[[first, *range(1, len(base) + 1)] for first in policy],
        policy_logprobs=[list(row) for row in policy.values()],
        base_logprobs=[list(base)] * len(policy),
    )
    manifest = read_manifest(adapter.path).model_copy(update={"canary": canary})
    write_json(adapter.manifest_path, manifest.model_dump(mode="json"))

    async def load_and_verify() -> CanaryReading:
        await pool.load(adapter)
        return await pool.verify(adapter)

    return asyncio.run(load_and_verify())


def test_an_engine_is_asked_once_for_each_version_and_once_for_the_base(tmp_path: Path) -> None:
    older, newer = (scores(0, size, lambda move, _: move) for size in (0.1, 0.12))
    answers = {"base": older.engine_base, "policy-v000001": older.engine, "policy-v000002": newer.engine}
    engine = Scoring(lambda model, _: list(answers[model]))
    pool = EnginePool([engine], tolerance=None)  # type: ignore[list-item]
    take(pool, tmp_path, 1, {0: older.policy}, older.base)
    assert engine.asked == [("policy-v000001", 0), ("base", 0)]
    reading = take(pool, tmp_path, 2, {0: newer.policy}, newer.base)
    assert engine.asked[2:] == [("policy-v000002", 0)]
    assert reading.as_metrics()["canary/rounding"] == pytest.approx(reading.rounding)
    assert pool.loaded[-1].version == 2
    answers["policy-v000003"] = newer.engine
    third = scores(0, 0.14, lambda move, _: move)
    with pytest.raises(SyncFailed, match="logprobs are those of the version before"):
        take(pool, tmp_path, 3, {0: third.policy}, third.base)


def test_the_version_before_is_compared_on_the_sequence_that_both_have(tmp_path: Path) -> None:
    def answer(model: str, first: int) -> list[float]:
        return [-2.0, -2.5] if model == "base" else [-2.1 - first, -2.6 - first]

    engine = Scoring(answer)
    pool = EnginePool([engine], tolerance=None)  # type: ignore[list-item]
    base = [-2.0, -2.5]
    take(pool, tmp_path, 1, {first: [-2.1 - first, -2.6 - first] for first in (0, 1)}, base)
    assert engine.asked == [("policy-v000001", 0), ("base", 0), ("policy-v000001", 1), ("base", 1)]
    with pytest.raises(SyncFailed, match="100% of the canary logprobs are those of the version before"):
        take(pool, tmp_path, 2, {first: [-2.2 - first, -2.7 - first] for first in (1, 2)}, base)
    assert engine.asked[4:] == [("policy-v000002", 1), ("policy-v000002", 2), ("base", 2)]


TOKENS = 23
MOVE = 0.15


def rounded(*names: object) -> np.ndarray:
    """A rounding that depends on the model and the sequence."""
    return np.random.default_rng(zlib.crc32(repr(names).encode())).normal(0, 0.05, TOKENS)


def moved(version: int, first: int) -> np.ndarray:
    """How the trainer's adapter moves the logprobs of a sequence."""
    return np.random.default_rng(1000 * version + first).normal(0, MOVE, TOKENS)


def versions_until_refused(folder: Path, share: Callable[[int], float], last: int = 30) -> tuple[int, str]:
    """The first version that is refused if the engine applies `share(version)` of it, and the reason."""
    base = np.linspace(-3, -1, TOKENS)

    def answer(model: str, first: int) -> list[float]:
        version = 0 if model == "base" else int(model[-6:])
        applied = share(version) * moved(version, first) if version else 0.0
        return (base + applied + rounded(model, first)).tolist()

    pool = EnginePool([Scoring(answer)], tolerance=None)  # type: ignore[list-item]
    for version in range(1, last + 1):
        policy = {first: (base + moved(version, first)).tolist() for first in sequences_of(version, 24)}
        try:
            take(pool, folder, version, policy, base.tolist())
        except SyncFailed as error:
            return version, error.what
    return last + 1, ""


def test_every_version_of_a_right_engine_passes(tmp_path: Path) -> None:
    assert versions_until_refused(tmp_path, lambda version: 1.0) == (31, "")


def test_an_engine_that_applies_adapters_in_part_is_found_by_several_versions(tmp_path: Path) -> None:
    """The 46 tokens of one version are too few."""
    version, reason = versions_until_refused(tmp_path, lambda version: 0.6)
    assert 2 < version < 24
    assert "judged with the versions before it" in reason


def test_an_engine_that_drops_most_of_one_adapter_is_found_in_that_version(tmp_path: Path) -> None:
    version, reason = versions_until_refused(tmp_path, lambda version: 1.0 if version < 20 else -1.0)
    assert version == 20
    assert "policy-v000020 that" in reason


def test_versions_that_equal_the_base_do_not_count_among_the_others(tmp_path: Path) -> None:
    """Version 0 has the base's logprobs, and its bits where nothing is rounded."""
    base, moves = [-2.0, -2.5, -3.0], [-2.5, -2.1, -3.3]
    pool = EnginePool([Scoring(lambda model, _: base if model != "policy-v000001" else moves)], None)  # type: ignore[list-item]
    assert math.isnan(take(pool, tmp_path, 0, dict.fromkeys(range(24), base), base).projection)
    assert take(pool, tmp_path, 1, dict.fromkeys(range(2), moves), base).projection == pytest.approx(1.0)
    [answers] = pool._answers.values()
    assert len(answers.newest) == 2
