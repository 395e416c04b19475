"""The bfloat16 canary on simulated roundings."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from skylite.engine.canary_bf16 import PairedReading, Scores, check_paired, joined, read_paired
from skylite.engine.canary_reading import CanaryReading
from skylite.errors import SyncFailed
from tests.unit.canary_cases import Array, is_refused, rounding, scores


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
        read_paired(Scores(**(two | {name: [-1.0] for name in short})))


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
