"""The float32 canary finds every wrong adapter whose move exceeds the engine's noise, and no right one."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest

from skylite.engine.canary_limits_bf16 import Scores
from skylite.engine.canary_limits_float32 import MIN_NOISE, check_float32, read_float32
from skylite.errors import SyncFailed

N = 46
NOISE = 2e-5
Array = np.ndarray


def noise(rng: np.random.Generator, size: float = NOISE) -> Array:
    """Heavier tails than a normal distribution, as measured."""
    return rng.standard_t(4, N) * size / math.sqrt(2)


def scores(seed: int, size: float, engine_move: Callable[[Array, Array], Array]) -> Scores:
    """An adapter that moves the logprobs by `size`, after a version before that moved them by half of it.

    `engine_move` makes the engine's move from the moves of this version and of the version before.
    """
    rng = np.random.default_rng(seed)
    base, move = -rng.exponential(2.0, N), rng.normal(0, size, N)
    before = move / 2 + rng.normal(0, size / 4, N)
    return Scores(
        engine=(base + engine_move(move, before) + noise(rng)).tolist(),
        engine_base=(base + noise(rng)).tolist(),
        policy=(base + move).tolist(),
        base=base.tolist(),
        engine_before=(base + before + noise(rng)).tolist(),
        policy_before=(base + before).tolist(),
    )


def is_refused(found: Scores, tolerance: float = 0.002) -> bool:
    try:
        check_float32("policy-v000001", "engine-0", read_float32(found), tolerance)
    except SyncFailed:
        return True
    return False


def test_noise_alone_is_refused_in_no_draw() -> None:
    """From an adapter that equals the base to one that moves the logprobs by a nat."""
    sizes = (0.0, 1e-6, 1e-5, 1e-4, 1e-3, 0.01, 0.1, 1.0)
    assert not any(is_refused(scores(seed, size, lambda m, _: m)) for size in sizes for seed in range(250))


def rolled(move: Array, _: Array) -> Array:
    return np.roll(move, 1)


WRONG: dict[str, Callable[[Array, Array], Array]] = {
    "the base": lambda m, _: 0 * m,
    "half": lambda m, _: 0.5 * m,
    "one and a half": lambda m, _: 1.5 * m,
    "another adapter": rolled,
    "the version before": lambda _, before: before,
}


@pytest.mark.parametrize("kind", WRONG)
def test_a_wrong_adapter_is_refused_or_its_move_is_too_small_to_tell(kind: str) -> None:
    """At no size is a wrong adapter called verified."""
    refused = {}
    for size in (1e-6, 1e-5, 3e-5, 1e-4, 3e-4, 1e-3, 1e-2):
        draws = [scores(seed, size, WRONG[kind]) for seed in range(60)]
        refused[size] = sum(map(is_refused, draws)) / len(draws)
        assert all(is_refused(d) or not read_float32(d).reading.is_verified for d in draws)
    assert refused[1e-3] == refused[1e-2] == 1.0
    assert refused[1e-6] == 0.0


def test_the_base_is_refused_as_soon_as_the_move_is_as_large_as_four_times_the_noise() -> None:
    """Until now the limit was 100 times the noise: 0.002."""
    assert all(is_refused(scores(seed, 4 * NOISE, WRONG["the base"])) for seed in range(200))


def test_a_small_part_of_a_large_move_is_found() -> None:
    """One token in ten does not move. That is a third of the move."""

    def partly(move: Array, _: Array) -> Array:
        return np.where(np.arange(N) % 10, move, 0.0)

    assert all(is_refused(scores(seed, 0.003, partly)) for seed in range(100))


def test_a_right_adapter_is_verified_once_its_move_is_large_enough() -> None:
    shares = [
        sum(read_float32(scores(seed, size, lambda m, _: m)).reading.is_verified for seed in range(100)) / 100
        for size in (1e-5, 1e-4, 0.01)
    ]
    assert shares == [0.0, 0.0, 1.0]


def test_a_version_that_hardly_differs_from_the_one_before_is_too_small_to_tell() -> None:
    far = scores(0, 0.1, lambda m, _: m)
    assert read_float32(far).reading.is_verified
    near = replace(far, policy_before=[p + 1e-7 for p in far.policy], engine_before=far.engine)
    assert not read_float32(near).reading.is_verified
    assert not is_refused(near)


def test_numbers_by_hand() -> None:
    found = read_float32(
        Scores(engine=[-1.5, -1.7], engine_base=[-1.9, -2.1], policy=[-1.4, -1.7], base=[-2.0, -2.2])
    )
    reading = found.reading
    assert reading.rounding == pytest.approx(0.1)
    assert reading.gap_max == pytest.approx(0.1)
    assert reading.gap_mean == pytest.approx(0.05)
    assert reading.base_distance == pytest.approx((0.6 + 0.5) / 2)
    # Moves of the engine: 0.4, 0.4. Of the trainer: 0.6, 0.5.
    energy = 0.36 + 0.25
    assert reading.projection == pytest.approx((0.4 * 0.6 + 0.4 * 0.5) / energy)
    assert found.projection_limit == pytest.approx(8 * math.sqrt(2 / energy) * 0.1 + 0.005)
    assert found.gap_rms == pytest.approx(math.sqrt(0.01 / 2))
    assert found.gap_limit == pytest.approx(4 * 0.1 + 0.005 * math.sqrt(energy / 2))
    assert reading.visible == pytest.approx(found.gap_limit / math.sqrt(energy / 2))
    assert math.isnan(found.towards_before)


def test_the_version_before_is_1_on_the_way_to_it() -> None:
    draw = scores(0, 0.01, WRONG["the version before"])
    found = read_float32(draw)
    assert found.towards_before == pytest.approx(1.0, abs=0.02)
    assert read_float32(scores(0, 0.01, lambda m, _: m)).towards_before == pytest.approx(0.0, abs=0.02)


def test_an_untrained_adapter_equals_the_base_and_is_too_small_to_tell() -> None:
    base = [-1.4, -1.8, -0.9]
    found = Scores(engine=base, engine_base=base, policy=base, base=base)
    reading = read_float32(found).reading
    assert not is_refused(found)
    assert math.isnan(reading.projection)
    assert (reading.is_verified, reading.verdict) == (False, "too small to tell")
    metrics = reading.as_metrics()
    assert metrics["canary/verified"] == 0.0
    assert not {"canary/projection", "canary/visible_frac"} & metrics.keys()


def test_without_any_noise_a_last_bit_is_allowed() -> None:
    policy, base = [-1.0, -2.0], [-1.5, -2.5]
    right = Scores(engine=[-1.0 + MIN_NOISE, -2.0], engine_base=base, policy=policy, base=base)
    assert not is_refused(right)
    assert read_float32(right).reading.is_verified


@pytest.mark.parametrize("where", ["engine", "engine_base"])
@pytest.mark.parametrize("gap", [0.0021, math.nan])
def test_no_gap_may_exceed_the_tolerance_with_the_adapter_or_without(where: str, gap: float) -> None:
    """Otherwise an engine with another base would raise its own limits."""
    right = scores(0, 0.05, lambda m, _: m)
    assert not is_refused(right)
    values = list(getattr(right, where))
    values[3] += gap
    assert is_refused(replace(right, **{where: values}))  # type: ignore[arg-type]
    assert is_refused(replace(right, engine_base=[x + 0.0021 for x in right.base]))
