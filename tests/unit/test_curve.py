"""Curves and bars of the live panel, as text."""

from __future__ import annotations

import math

from skylite.ui.curve import curve, proportional_widths, resample


def test_a_curve_rises_with_its_values() -> None:
    assert curve([0.0, 0.5, 1.0], 10, 1) == ["▁▄█"]
    assert curve([0.0, 0.5, 1.0], 10, 2) == ["  █", "▁██"]
    assert curve([-1.0, 3.0], 10, 1) == ["▁█"]
    assert curve([0.01, 0.02, 0.03], 10, 1) == ["▁▄█"], "small rewards have a curve too"
    assert curve([0.01, 0.02], 10, 1, (0.0, 1.0)) == ["▁▁"]
    assert curve([math.nan, 1.0], 10, 1) == [" ▄"], "one value is in the middle"


def test_a_long_series_is_averaged_over_its_full_length() -> None:
    assert resample([0, 1, 2, 3, 4, 5], 3) == [0.5, 2.5, 4.5]
    assert resample([1, 2], 5) == [1, 2]
    assert len(resample(list(range(1000)), 37)) == 37


def test_proportional_widths_sum_to_the_width() -> None:
    assert proportional_widths([1, 1, 1], 10) == [4, 3, 3]
    assert proportional_widths([6, 3, 1], 10) == [6, 3, 1]
    assert proportional_widths([0, 0], 10) == [0, 0]
    assert sum(proportional_widths([0.52, 0.44, 0.02, 0.02], 17)) == 17
