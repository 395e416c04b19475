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
FALLEN_REWARD = 0.2
"""Lost part of the best reward from which it fell."""
LOST = 0.75
"""Lost part of the best score or reward from which a policy has collapsed."""
SAMPLES = 16
"""Independent completions that a step has at least: sets the noise of a single step's mean reward."""


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Fall:
    """A reward that clearly fell, from its best to the last fifth of the steps."""

    best: float
    last: float

    @property
    def share(self) -> float:
        """The lost part of the best reward."""
        return (self.best - self.last) / max(abs(self.best), 1e-3)


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOutFall:
    """A held-out score that clearly fell, and the training reward from that version to the end."""

    best: HeldOut
    last: HeldOut
    before: float
    """Mean training reward around the best version."""
    after: float
    """Mean training reward of the last fifth of the steps."""
    reward_rose: bool
    reward_held: bool
    """The training reward kept four fifths of its level, above the bottom of its range."""

    @property
    def share(self) -> float:
        """The lost part of the best score."""
        best = self.best.score.mean
        return (best - self.last.score.mean) / max(abs(best), 1e-3)


@dataclass(frozen=True, slots=True)
class Evidence:
    """The input of the rules: everything up to one step."""

    metrics: Sequence[Mapping[str, Any]]
    held_out: Sequence[HeldOut]
    repetition: Mapping[int, float]
    """Step -> mean repetition of its completions, for the steps that were read."""

    def series(self, key: str) -> list[float]:
        return [x for m in self.metrics if math.isfinite(x := number(m, key))]

    def last(self, key: str, least: int = MIN_WINDOW) -> float:
        """Mean over the last fifth of the steps, nan with fewer than `least` values."""
        values = self.series(key)
        return statistics.fmean(values[-window(len(values)) :]) if len(values) >= least else math.nan

    def change(self, key: str) -> Change | None:
        return change_of(self.series(key))

    @property
    def improved(self) -> bool:
        """By the held-out score; without two evaluations by the share of right completions."""
        if len(self.held_out) >= 2:
            return held_out_gain(self.held_out[0], self.held_out[-1]) > 0
        return self._right_rose

    @property
    def accuracy_rose(self) -> bool:
        """As `improved`, but only scores of 0 or 1 count: a partial score may be what is gamed."""
        if len(self.held_out) >= 2 and all(h.score.is_binary for h in self.held_out):
            return self.improved
        return self._right_rose

    @property
    def _right_rose(self) -> bool:
        change = self.change("reward/right_frac")
        return change is not None and change.rose

    def reward_fall(self) -> Fall | None:
        """Set if the reward clearly lost a fifth of its best, or three quarters of its first steps'."""
        return self._slow_fall() or self._instant_fall()

    def _slow_fall(self) -> Fall | None:
        values = self.series("reward/mean")
        width = window(len(values))
        if len(values) < 2 * width:
            return None
        windows = [values[k : k + width] for k in range(len(values) - width + 1)]
        last, best = windows[-1], max(windows[:-width], key=statistics.fmean)
        fall = Fall(best=statistics.fmean(best), last=statistics.fmean(last))
        error = math.sqrt((statistics.variance(best) + statistics.variance(last)) / width)
        # The best of many windows is high by chance: ask for more than CLEAR.
        is_clear = fall.best - fall.last > 2 * CLEAR * error
        return fall if is_clear and fall.share >= FALLEN_REWARD else None

    def _instant_fall(self) -> Fall | None:
        """A fall within the first fifth of the steps, which no comparison of fifths shows."""
        rows = [(number(m, "reward/mean"), number(m, "reward/std")) for m in self.metrics]
        rows = [row for row in rows if all(map(math.isfinite, row))]
        width = window(len(rows))
        last = [mean for mean, _ in rows[-width:]]
        for count in range(1, min(width, len(rows) - width + 1)):
            noise = statistics.fmean(std**2 for _, std in rows[:count]) / (SAMPLES * count)
            error = math.sqrt(noise + statistics.variance(last) / width)
            fall = Fall(best=statistics.fmean(mean for mean, _ in rows[:count]), last=statistics.fmean(last))
            if fall.share >= LOST and fall.best - fall.last > CLEAR * error:
                return fall
        return None

    def held_out_fall(self) -> HeldOutFall | None:
        """Set if the last held-out score is clearly under the best one before it."""
        if len(self.held_out) < 2:
            return None
        *earlier, last = self.held_out
        best = max(earlier, key=lambda h: h.score.mean)
        rewards = [(int(m["step"]), r) for m in self.metrics if math.isfinite(r := number(m, "reward/mean"))]
        # Step v + 1 is sampled from version v.
        before = [r for step, r in rewards if step <= best.version + 1][-MIN_WINDOW:]
        after = [r for step, r in rewards if step > best.version + 1]
        if held_out_gain(best, last) >= 0 or not before or not after:
            return None
        rose = change_of([r for step, r in rewards if step > best.version])
        end, start = statistics.fmean(after[-window(len(after)) :]), statistics.fmean(before)
        low, high = min(r for _, r in rewards), max(r for _, r in rewards)
        has_rose = rose is not None and rose.rose
        is_level = start - end < FALLEN_REWARD * max(abs(start), 1e-3)
        return HeldOutFall(
            best=best,
            last=last,
            before=start,
            after=end,
            reward_rose=has_rose,
            reward_held=has_rose or (is_level and end - low > FALLEN_REWARD * (high - low)),
        )


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
    error = math.hypot(a.score.standard_error, b.score.standard_error)
    gain = b.score.mean - a.score.mean
    return gain if abs(gain) > CLEAR_HELD_OUT * error else 0.0
