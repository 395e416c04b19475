"""Confidence intervals against values computed by hand."""

import pytest

from skylite.evaluation.confidence_interval import clustered, mean_score, wilson


def test_wilson_matches_a_worked_example() -> None:
    # p = 0.8, n = 10: centre (0.8 + 0.19207) / 1.38415 = 0.71674,
    # half width 1.96 / 1.38415 * sqrt(0.016 + 0.009604) = 0.22659
    result = wilson(8, 10)
    assert (result.low, result.high) == pytest.approx((0.4902, 0.9433), abs=2e-4)


def test_wilson_stays_inside_zero_and_one() -> None:
    assert wilson(0, 20).low == 0.0
    assert wilson(20, 20).high == pytest.approx(1.0)


def test_samples_of_one_problem_count_as_one_observation() -> None:
    # Two problems with means 1 and 0: standard error 0.7071 / sqrt(2) = 0.5 for any number of samples.
    assert mean_score([[1.0] * 50, [0.0] * 50]).standard_error == pytest.approx(
        clustered([1.0, 0.0]).standard_error
    )
    wide = clustered([0.9, 0.5, 0.7, 0.3])
    assert wide.mean == pytest.approx(0.6)
    assert wide.standard_error == pytest.approx((0.2 / 3) ** 0.5 / 2, rel=1e-6)
