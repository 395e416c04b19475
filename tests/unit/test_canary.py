"""The canary distinguishes this adapter from the base model, another version and noise."""

import math
from dataclasses import replace
from itertools import pairwise

import pytest

from skylite.engine import canary_bf16
from skylite.engine.canary import (
    DEFAULT_TOLERANCE,
    NUM_SEQUENCES,
    canary_sequences,
    check_reading,
    compare_logprobs,
)
from skylite.engine.canary_reading import CanaryReading
from skylite.errors import SyncFailed
from skylite.trainer.canary import sequences_of
from tests.unit.data_cases import prompt

POLICY = [-1.0, -2.0, -0.5]
BASE = [-1.4, -1.8, -0.9]


def test_the_engine_with_the_adapter_passes() -> None:
    reading = compare_logprobs([-1.0001, -2.0, -0.4999], POLICY, BASE)
    assert reading.gap_max == pytest.approx(1e-4)
    assert reading.gap_mean == pytest.approx(2e-4 / 3)
    assert reading.base_distance == pytest.approx((0.4 + 0.2 + 0.4) / 3)
    assert reading.projection == pytest.approx(1.0, abs=1e-3)
    check_reading("policy-v000001", "vllm-0", reading, 0.002)


def test_an_engine_that_serves_the_base_is_rejected() -> None:
    with pytest.raises(SyncFailed, match="does not sample from the adapter policy-v000001"):
        check_reading("policy-v000001", "vllm-0", compare_logprobs(BASE, POLICY, BASE), 0.002)


def test_the_projection_is_the_fraction_of_the_way_from_base_to_adapter() -> None:
    reading = compare_logprobs([b + 0.01 for b in BASE], POLICY, BASE)
    assert reading.gap_max < 0.5
    near = compare_logprobs([-1.38, -1.81, -0.88], [-1.0, -2.0, -0.5], BASE)
    assert near.projection == pytest.approx((0.02 * 0.4 + 0.01 * 0.2 + 0.02 * 0.4) / 0.36)


def test_a_large_tolerance_still_rejects_a_clear_base() -> None:
    policy, base = [-1.0, -2.0, -3.0, -4.0], [-1.0, -2.0, -3.0, -3.0]
    engine = [-1.0, -2.0, -3.0, -3.0]
    reading = compare_logprobs(engine, policy, base)
    assert reading.projection == 0.0
    with pytest.raises(SyncFailed):
        check_reading("policy-v000002", "vllm-0", reading, 0.5)


@pytest.mark.parametrize("way", [-0.5, 0.0, 0.4, 0.5, 1.5, 1.6, 3.0])
def test_an_engine_that_moved_another_way_is_rejected_within_the_tolerance(way: float) -> None:
    """Only the projection sees it: every gap is within 0.5, and the mean gap is small beside the move."""
    base, policy = [-1.0] * 9, [-1.0] * 8 + [-1.4]
    reading = compare_logprobs([*base[:8], -1.0 - 0.4 * way], policy, base)
    assert reading.projection == pytest.approx(way)
    quiet = replace(reading, gap_max=0.0, gap_mean=reading.base_distance / 4.5)
    with pytest.raises(SyncFailed, match=f"answers as the frozen base .* moved {way:.2f} of the way"):
        check_reading("policy-v000001", "vllm-0", quiet, 0.5)


@pytest.mark.parametrize("way", [0.5, 1.5])
def test_a_projection_of_exactly_a_bound_is_rejected(way: float) -> None:
    reading = CanaryReading(gap_max=0.1, gap_mean=0.01, base_distance=0.1, projection=way)
    with pytest.raises(SyncFailed, match="answers as the frozen base"):
        check_reading("policy-v000001", "vllm-0", reading, 0.1)


@pytest.mark.parametrize("way", [0.51, 1.0, 1.49])
def test_an_engine_that_moved_about_the_right_way_passes(way: float) -> None:
    reading = CanaryReading(gap_max=0.1, gap_mean=0.01, base_distance=0.1, projection=way)
    check_reading("policy-v000001", "vllm-0", reading, 0.1)


def test_a_move_within_the_noise_is_not_judged_by_its_projection() -> None:
    reading = CanaryReading(gap_max=0.1, gap_mean=0.01, base_distance=0.04, projection=0.0)
    check_reading("policy-v000001", "vllm-0", reading, 0.1)
    with pytest.raises(SyncFailed, match="answers as the frozen base"):
        check_reading("policy-v000001", "vllm-0", replace(reading, base_distance=0.0401), 0.1)


def test_a_gap_of_exactly_the_tolerance_passes() -> None:
    reading = CanaryReading(gap_max=0.5, gap_mean=0.1, base_distance=0.1, projection=math.nan)
    check_reading("policy-v000001", "vllm-0", reading, 0.5)
    with pytest.raises(
        SyncFailed, match=r"differ by up to 0\.5001 \(tolerance 0\.5; .* 0\.1000 from the base"
    ):
        check_reading("policy-v000001", "vllm-0", replace(reading, gap_max=0.5001), 0.5)


@pytest.mark.parametrize(("dtype", "count"), [("float32", 2), ("bfloat16", 24)])
def test_the_canary_is_the_start_of_the_first_prompts(dtype: str, count: int) -> None:
    class Letters:
        """One token for each character."""

        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [[ord(c) for c in text] for text in texts]

    messages = [{"role": "user", "content": "example"}, {"role": "user", "content": "q" * 40}]
    others = [prompt(messages=[{"role": "user", "content": f"{i}?"}]) for i in range(40)]
    found = canary_sequences(Letters(), [prompt(messages=messages), *others], dtype)  # type: ignore[arg-type]
    assert len(found) == count
    assert found[0] == [ord("q")] * 24
    assert found[1] == [ord(c) for c in "0?\n7"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_prompts_that_begin_alike_give_distinct_sequences(dtype: str) -> None:
    """All prompts of a game are its rules. Equal sequences would repeat one rounding error."""

    class Words:
        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [list(range(170)) for _ in texts]

    found = canary_sequences(Words(), [prompt()] * 40, dtype)  # type: ignore[arg-type]
    assert len(found) == NUM_SEQUENCES[dtype]
    assert len(set(map(tuple, found))) == len(found)
    assert found[:2] == [list(range(24)), list(range(24, 48))]


def test_version_0_is_scored_on_all_sequences_and_each_later_one_on_two_in_turn() -> None:
    assert sequences_of(0, 24) == list(range(24))
    chosen = [sequences_of(version, 24) for version in range(1, 60)]
    assert chosen[:3] == [[0, 1], [1, 2], [2, 3]]
    assert chosen[22:25] == [[22, 23], [23, 0], [0, 1]]
    assert all(before[1] == now[0] for before, now in pairwise(chosen)), "each shares one with the last"
    assert {index for pair in chosen[:23] for index in pair} == set(range(24))


def test_two_sequences_or_fewer_are_scored_in_every_version() -> None:
    assert [sequences_of(version, 2) for version in (0, 1, 2, 19)] == [[0, 1]] * 4
    assert [sequences_of(version, 1) for version in (0, 1, 2)] == [[0]] * 3


def test_a_text_of_one_token_is_no_canary() -> None:
    class Short:
        def encode_texts(self, texts: list[str]) -> list[list[int]]:
            return [[1], [1, 2]]

    assert canary_sequences(Short(), [prompt()], "float32") == [[1, 2]]  # type: ignore[arg-type]


def test_the_limits_of_the_canary() -> None:
    assert DEFAULT_TOLERANCE == {"float32": 0.002, "bfloat16": None}
    assert (canary_bf16.CLIP, canary_bf16.CLIP_GAPS) == (3.0, 10.0)
    assert (canary_bf16.MAX_STANDARD_ERRORS, canary_bf16.SLACK) == (4.0, 0.05)
    assert (canary_bf16.ROUNDED_AWAY, canary_bf16.MOST_ROUNDED_AWAY, canary_bf16.MOVED) == (0.4, 0.6, 0.02)
    assert (canary_bf16.MAX_GAP_RATIO, canary_bf16.MOVE_ROUNDING, canary_bf16.MAX_ROUNDING) == (
        1.4,
        1 / 64,
        1.0,
    )


def test_an_untrained_adapter_equals_the_base_and_passes() -> None:
    reading = compare_logprobs([-1.4, -1.8, -0.9], BASE, BASE)
    assert math.isnan(reading.projection)
    assert "canary/projection" not in reading.as_metrics()
    check_reading("policy-v000000", "vllm-0", reading, 0.002)


def test_nan_logprobs_never_pass() -> None:
    with pytest.raises(SyncFailed):
        check_reading(
            "policy-v000001", "vllm-0", compare_logprobs([math.nan, -2.0, -0.5], POLICY, BASE), 0.002
        )
