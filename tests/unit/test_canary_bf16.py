"""The bfloat16 canary on simulated roundings."""

from __future__ import annotations

import asyncio
import math
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from skylite.adapters.manifest import Canary, read_manifest
from skylite.engine.canary import Row
from skylite.engine.canary_limits_bf16 import (
    PairedReading,
    Scores,
    check_paired,
    joined,
    read_paired,
    read_together,
)
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import EnginePool
from skylite.errors import SyncFailed
from skylite.run.files import write_json
from skylite.run.run_dir import AdapterVersion
from skylite.trainer.canary import sequences_of
from skylite.types import EncodedPrompt
from tests.unit.engine_cases import publish


def refused(size: float, engine_move: Callable[[Array, np.random.Generator], Array]) -> float:
    """Share of 100 canaries that are refused."""
    return sum(is_refused(scores(seed, size, engine_move)) for seed in range(100)) / 100


@pytest.mark.parametrize("size", [0.0, 0.02, 0.1, 0.5])
def test_rounding_alone_passes(size: float) -> None:
    assert refused(size, lambda move, _: move) == 0.0


@pytest.mark.parametrize(("factor", "share"), [(0.0, 1.0), (0.5, 0.9), (1.5, 0.9), (2.0, 1.0), (-1.0, 1.0)])
def test_a_scaled_or_missing_adapter_is_refused(factor: float, share: float) -> None:
    assert refused(0.1, lambda move, _: factor * move) >= share


def test_another_adapter_of_the_same_size_is_refused() -> None:
    assert refused(0.1, lambda move, rng: rng.permutation(move)) == 1.0


def test_noise_beyond_rounding_is_refused() -> None:
    assert refused(0.1, lambda move, rng: move + 4 * rounding(rng)) > 0.9


def test_numbers_by_hand() -> None:
    paired = read_paired(
        Scores(engine=[-1.0, -2.1], engine_base=[-1.5, -2.5], policy=[-1.0, -2.0], base=[-1.6, -2.4])
    )
    found = paired.reading
    assert found.gap_mean == pytest.approx(0.05)
    assert found.rounding == pytest.approx(0.1)
    # Moves of the engine: 0.5, 0.4. Of the trainer: 0.6, 0.4.
    assert found.projection == pytest.approx((0.5 * 0.6 + 0.4 * 0.4) / (0.36 + 0.16))
    assert found.projection_error == pytest.approx(0.1 * 0.6 / 0.52)
    vanished = 0.4 * 0.1 / math.sqrt(0.52 / 2)
    assert paired.projection_limit == pytest.approx(4 * found.projection_error + 0.05 + vanished)


def test_one_wild_token_does_not_decide() -> None:
    found = scores(0, 0.1, lambda move, _: move)
    assert not is_refused(found)
    wild = Scores(
        engine=[found.engine[0] - 3.0, *found.engine[1:]],
        engine_base=found.engine_base,
        policy=found.policy,
        base=found.base,
    )
    assert not is_refused(wild)


def test_wild_tokens_are_clipped_at_three_medians() -> None:
    """The engine's move is off by 0.1, 0.2, 0.3 and 9: the median is 0.25, and 9 counts as 0.75."""
    off, ones = [0.1, -0.2, 0.3, 9.0], [-1.0] * 4
    found = read_paired(Scores(engine=off, engine_base=ones, policy=[0.0] * 4, base=ones))
    assert found.reading.projection == pytest.approx(1 + (0.1 - 0.2 + 0.3 + 0.75) / 4)
    assert found.reading.projection_error == pytest.approx((0.01 + 0.04 + 0.09 + 0.5625) ** 0.5 / 4)
    assert found.reading.gap_max == 9.0


def test_gaps_are_clipped_at_ten_medians_of_the_base() -> None:
    """The base's gaps are 0.1, 0.1, 0.1, 5: ten medians are 1. The adapter's are 0.1, 0.3, 8, 0.2."""
    engine, own = [0.6, 0.8, 8.5, 0.7], [0.1, 0.1, 0.1, 5.0]
    found = read_paired(Scores(engine=engine, engine_base=own, policy=[0.5] * 4, base=[0.0] * 4))
    assert found.clipped_gap == pytest.approx((0.1 + 0.3 + 1.0 + 0.2) / 4)
    # The gaps grew by 0, 0.2, 0.9 and -0.8. Six standard errors are more than 0.4 times the base's mean.
    deviation = ((0.2**2 + 0.9**2 + 0.8**2) / 4 - 0.075**2) ** 0.5
    assert found.gap_limit == pytest.approx((0.3 + 1.0) / 4 + 6 * deviation / 4**0.5 + 0.5 / 64)
    assert found.reading.gap_mean == pytest.approx(8.6 / 4)


def test_without_any_rounding_no_gap_is_clipped() -> None:
    found = read_paired(Scores(engine=[2.0, 1.0], engine_base=[0.0] * 2, policy=[1.0, 1.0], base=[0.0] * 2))
    assert found.clipped_gap == 0.5
    assert found.gap_limit == pytest.approx(6 * 0.5 / 2**0.5 + 1 / 64), "the gaps grew by 1 and 0"


def test_with_many_tokens_the_mean_gap_may_be_1_4_times_that_of_the_base() -> None:
    """The gaps are 0.1 without and 0.15 with the adapter, which moves the logprobs by 0.64."""
    found = read_paired(
        Scores(engine=[-0.85] * 50, engine_base=[-1.54] * 50, policy=[-1.0] * 50, base=[-1.64] * 50)
    )
    assert found.clipped_gap == pytest.approx(0.15)
    assert found.gap_limit == pytest.approx(1.4 * 0.1 + 0.64 / 64)


@pytest.mark.parametrize("short", [["engine"], ["engine_base"], ["base"], ["engine", "engine_base"]])
def test_scores_of_different_lengths_are_an_error(short: list[str]) -> None:
    two = {name: [-1.0, -2.0] for name in ("engine", "engine_base", "policy", "base")}
    with pytest.raises(ValueError, match=r"is shorter|is longer"):
        read_paired(Scores(**(two | {name: [-1.0] for name in short})))  # type: ignore[arg-type]


def test_rounding_takes_at_most_a_share_of_the_limit() -> None:
    found = read_paired(
        Scores(engine=[0.9, -0.1], engine_base=[0.9, 0.1], policy=[0.0, 0.01], base=[0.0, 0.0])
    )
    assert found.projection_limit == pytest.approx(4 * found.reading.projection_error + 0.05 + 0.6)


def paired(limit: float = 0.2, clipped_gap: float = 0.5, **changes: Any) -> PairedReading:
    """A reading on the edge of every limit, which passes."""
    edge = CanaryReading(
        gap_max=9.0,
        gap_mean=2.0,
        base_distance=1.0,
        projection=1.2,
        rounding=1.0,
        projection_error=0.1,
    )
    return PairedReading(
        reading=replace(edge, **changes), projection_limit=limit, clipped_gap=clipped_gap, gap_limit=0.5,
        same_as="", same_tokens={}, is_told_apart=True,
    )  # fmt: skip


def test_each_limit_is_the_last_value_that_passes() -> None:
    check_paired("p", "e", paired(limit=0.20001))
    check_paired("p", "e", paired(limit=0.20001, projection=0.8))
    for found, words in (
        (paired(limit=0.19999), r"moved 1\.20 of the way .* expected 1 \+- 0\.20"),
        (paired(limit=0.19999, projection=0.8), r"moved 0\.80 of the way"),
        (paired(limit=0.3, clipped_gap=0.501), r"by 0\.501 nats on average without outliers, limit 0\.500"),
        (paired(limit=0.3, rounding=1.001), r"by 1\.001 nats on average \(limit 1\.0\)"),
    ):
        with pytest.raises(SyncFailed, match=words):
            check_paired("p", "e", found)


def test_another_base_model_is_refused() -> None:
    found = scores(0, 0.1, lambda move, _: move)
    other = Scores(
        engine=[x - 1.5 for x in found.engine],
        engine_base=[x - 1.5 for x in found.engine_base],
        policy=found.policy,
        base=found.base,
    )
    with pytest.raises(SyncFailed, match="disagree about the base model"):
        check_paired("policy-v000001", "engine-0", read_paired(other))


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_are_not_finite_are_refused(bad: float) -> None:
    found = scores(0, 0.1, lambda move, _: move)
    broken = Scores(
        engine=[bad, *found.engine[1:]],
        engine_base=found.engine_base,
        policy=found.policy,
        base=found.base,
    )
    assert is_refused(broken)


def test_joined_scores_begin_with_the_sequences_that_the_version_before_had() -> None:
    """read_paired compares the version before with the first tokens."""
    new = Scores(engine=[1.0], engine_base=[2.0], policy=[3.0], base=[4.0])
    shared = Scores(
        engine=[5.0], engine_base=[6.0], policy=[7.0], base=[8.0], engine_before=[9.0], policy_before=[10.0]
    )
    assert joined([new, shared]) == Scores(
        engine=[5.0, 1.0],
        engine_base=[6.0, 2.0],
        policy=[7.0, 3.0],
        base=[8.0, 4.0],
        engine_before=[9.0],
        policy_before=[10.0],
    )
    assert joined([new]) == new


N = 552
Array = np.ndarray


def rounding(rng: np.random.Generator) -> Array:
    """Heavy tails, as measured: mean 0.05 nats, a few beyond one."""
    return rng.standard_t(2.5, N) * 0.035


def scores(seed: int, size: float, engine_move: Callable[[Array, np.random.Generator], Array]) -> Scores:
    """An adapter that moves the logprobs by `size` (root mean square), and an engine that moves otherwise."""
    rng = np.random.default_rng(seed)
    base, move = -rng.exponential(2.0, N), rng.normal(0, size, N)
    return Scores(
        engine=(base + engine_move(move, rng) + rounding(rng)).tolist(),
        engine_base=(base + rounding(rng)).tolist(),
        policy=(base + move).tolist(),
        base=base.tolist(),
    )


def is_refused(found: Scores) -> bool:
    try:
        check_paired("policy-v000001", "engine-0", read_paired(found))
    except SyncFailed:
        return True
    return False


def test_the_version_before_is_compared_on_its_first_tokens() -> None:
    engine = [-1.0, -2.0, -3.0, -4.0]
    found = read_paired(
        Scores(
            engine=engine,
            engine_base=[x + 0.1 for x in engine],
            policy=[x + 0.2 for x in engine],
            base=engine,
            engine_before=engine[:2],
            policy_before=engine[:2],
        )
    )
    assert found.same_tokens == {"the base": 0.0, "the version before": 1.0}
    assert found.same_as == "the version before"
    with pytest.raises(ValueError, match="is longer"):
        read_paired(
            Scores(engine=[-1.0], engine_base=[-1.0], policy=[-1.0], base=[-1.0], engine_before=engine)
        )


@pytest.mark.parametrize(
    ("equal", "move", "same_as"),
    [(3, 0.4, "the version before"), (2, 0.4, ""), (3, 0.09, ""), (50, 0.09, "the version before")],
)
def test_a_few_tokens_with_the_same_bits_are_the_version_before(
    equal: int, move: float, same_as: str
) -> None:
    """Other requests beside the canary change the bits of most tokens. The base's rounding is 0.51."""
    engine = [-1.0 - k / 8 for k in range(50)]
    found = read_paired(
        Scores(
            engine=engine,
            engine_base=[-3.01] * 50,
            policy=[-1.5] * 50,
            base=[-2.5] * 50,
            engine_before=[x if k < equal else x - 1e-6 for k, x in enumerate(engine)],
            policy_before=[-1.5 - move] * 50,
        )
    )
    assert found.same_as == same_as
    assert found.same_tokens == {"the base": 0.0, "the version before": equal / 50}


@pytest.mark.parametrize(("equal", "same_as"), [(3, ""), (4, "the base")])
def test_of_many_tokens_a_fiftieth_must_have_the_same_bits(equal: int, same_as: str) -> None:
    """A warm start scores all sequences of the canary: three of 200 tokens may be equal by chance."""
    engine = [-1.0 - k / 8 for k in range(200)]
    served = [x if k < equal else x - 1e-6 for k, x in enumerate(engine)]
    base = [x - 0.1 for x in served]
    found = Scores(engine=engine, engine_base=served, policy=[x + 0.2 for x in base], base=base)
    assert read_paired(found).same_as == same_as


def test_a_version_before_without_the_trainers_scores_is_not_compared() -> None:
    found = scores(0, 0.01, lambda move, _: move)
    assert read_paired(replace(found, engine_before=found.engine)).same_as == ""
    assert read_paired(replace(found, policy_before=found.base)).same_as == ""


@pytest.mark.parametrize(("move", "same"), [(0.0021, "the base"), (0.0019, "")])
def test_equal_bits_are_found_if_the_adapter_moved_by_a_fiftieth_of_the_rounding(
    move: float, same: str
) -> None:
    engine = [-0.9, -2.1]
    found = Scores(engine=engine, engine_base=engine, policy=[-1.0 + move, -2.0 - move], base=[-1.0, -2.0])
    assert read_paired(found).same_as == same


@pytest.mark.parametrize("same", ["the base", "the version before"])
def test_the_bits_of_another_version_are_refused_while_rounding_hides_the_move(same: str) -> None:
    found = scores(0, 0.01, lambda move, _: move)
    other = found.engine_base if same == "the base" else [x + 0.01 for x in found.engine]
    served = Scores(
        engine=other,
        engine_base=found.engine_base,
        policy=found.policy,
        base=found.base,
        engine_before=other if same != "the base" else None,
        policy_before=[x + 0.02 for x in found.policy] if same != "the base" else None,
    )
    with pytest.raises(SyncFailed, match=f"100% of the canary logprobs are those of {same}, to the bit"):
        check_paired("policy-v000001", "engine-0", read_paired(served))


def test_an_unmoved_adapter_may_have_the_bases_bits() -> None:
    found = scores(0, 0.0, lambda move, _: move)
    equal = Scores(
        engine=found.engine_base, engine_base=found.engine_base, policy=found.base, base=found.base
    )
    reading = read_paired(equal)
    assert math.isnan(reading.reading.projection)
    check_paired("policy-v000000", "engine-0", reading)


def test_versions_judged_together_may_share_bits_with_the_base() -> None:
    """One that hardly differs from the base may have its bits; each was compared when it was new."""
    found = scores(0, 0.1, lambda move, _: move)
    equal = replace(found, engine=found.engine_base)
    assert read_paired(equal).same_as == "the base"
    assert read_together([equal]).same_as == ""
    together, alone = (r.reading for r in (read_together([equal]), read_paired(equal)))
    assert str(together) == str(alone)  # NaN among the numbers


class Scoring:
    """Answers the sequence [first, ...] with `answer(model, first)`, and notes what it was asked."""

    name = "engine-0"

    def __init__(self, answer: Callable[[str, int], list[float]]) -> None:
        self.answer, self.asked = answer, list[tuple[str, int]]()

    async def load_adapter(self, adapter: AdapterVersion) -> None: ...

    async def unload_adapter(self, name: str) -> None: ...

    async def score(self, model: str, prompt: EncodedPrompt) -> list[float]:
        first = prompt.token_ids[0]
        self.asked.append((model, first))
        return self.answer(model, first)


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
