"""The canary distinguishes this adapter from the base model, another version and noise."""

import math

import pytest

from skylite.engine.adapter_canary import check_reading, compare_logprobs
from skylite.errors import SyncFailed

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
