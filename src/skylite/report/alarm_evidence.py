"""What the rules of alarms.py see: metrics up to a step, and how a metric changed between start and end."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skylite.report.read_run import HeldOut, number

MIN_WINDOW = 3
CLEAR = 2.5
"""Standard errors from which a difference of means over steps counts."""
CLEAR_HELD_OUT = 1.96
"""Standard errors from which a difference of held-out accuracies counts."""


@dataclass(frozen=True, slots=True)
class Change:
    """The mean of a metric over the first and the last fifth of the steps."""

    before: float
    after: float
    error: float
    """Standard error of the difference."""

    @property
    def rose(self) -> bool:
        return self.after - self.before > max(CLEAR * self.error, 1e-6)

    @property
    def fell(self) -> bool:
        return self.before - self.after > max(CLEAR * self.error, 1e-6)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the rules: everything up to one step."""

    metrics: Sequence[Mapping[str, Any]]
    held_out: Sequence[HeldOut]
    repetition: Mapping[int, float]
    """Step -> mean repetition of its completions, for the steps that were read."""

    def series(self, key: str) -> list[float]:
        return [x for m in self.metrics if math.isfinite(x := number(m, key))]

    def last(self, key: str) -> float:
        """Mean over the last fifth of the steps, nan with too few."""
        values = self.series(key)
        width = window(len(values))
        return statistics.fmean(values[-width:]) if len(values) >= MIN_WINDOW else math.nan

    def change(self, key: str) -> Change | None:
        return change_of(self.series(key))

    @property
    def accuracy_rose(self) -> bool:
        """By the held-out accuracy; without two evaluations by the share of correct completions."""
        if len(self.held_out) >= 2:
            return held_out_gain(self.held_out[0], self.held_out[-1]) > 0
        change = self.change("reward/right_frac")
        return change is not None and change.rose


def window(count: int) -> int:
    """A fifth of the steps, at least three."""
    return max(MIN_WINDOW, count // 5)


def change_of(values: Sequence[float]) -> Change | None:
    """None with too few values for two windows."""
    width = window(len(values))
    if len(values) < 2 * width:
        return None
    first, last = values[:width], values[-width:]
    error = math.sqrt((statistics.variance(first) + statistics.variance(last)) / width)
    return Change(statistics.fmean(first), statistics.fmean(last), error)


def held_out_gain(a: HeldOut, b: HeldOut) -> float:
    """The accuracy of b over that of a; 0 if the difference is within the noise or not measurable."""
    error = math.hypot(a.accuracy.standard_error, b.accuracy.standard_error)
    gain = b.accuracy.mean - a.accuracy.mean
    return gain if abs(gain) > CLEAR_HELD_OUT * error else 0.0
