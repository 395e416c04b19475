"""The mean score of an evaluation, what it is called, and its 95 % confidence interval."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

Z_95 = 1.959963984540054


@dataclass(frozen=True, slots=True)
class MeanScore:
    """A mean score with its 95 % confidence interval; in [0, 1] if all scores are."""

    mean: float
    low: float
    high: float
    num_problems: int
    is_binary: bool
    """All scores are 0 or 1: only then the mean is an accuracy."""

    @property
    def standard_error(self) -> float:
        """Half the width of the interval, divided by 1.96."""
        return (self.high - self.low) / (2 * Z_95)

    @property
    def name(self) -> str:
        return score_name(is_binary=self.is_binary)

    @property
    def value(self) -> str:
        return score_value(self.mean, is_binary=self.is_binary)

    def __str__(self) -> str:
        if not self.is_binary:
            interval = f"95 % interval {self.low:.3g} to {self.high:.3g}"
            return f"{self.value} ({interval}, {self.num_problems} problems)"
        interval = f"95 % interval {100 * self.low:.1f} to {100 * self.high:.1f}"
        return f"{self.value} ({interval}, {self.num_problems} problems)"


def score_name(*, is_binary: bool) -> str:
    """What the mean of an evaluation is called, everywhere."""
    return "accuracy" if is_binary else "mean reward"


def score_value(mean: float, *, is_binary: bool) -> str:
    """An accuracy in percent, a mean reward as it is."""
    return f"{100 * mean:.1f} %" if is_binary else f"{mean:.3g}"


def wilson(num_correct: int, num_problems: int) -> MeanScore:
    """Wilson score interval for one correct-or-wrong answer per problem (Wilson 1927, JASA 22, p. 209)."""
    p, n, z2 = num_correct / num_problems, num_problems, Z_95**2
    centre = (p + z2 / (2 * n)) / (1 + z2 / n)
    half = Z_95 / (1 + z2 / n) * math.sqrt(p * (1 - p) / n + z2 / (4 * n * n))
    return MeanScore(p, max(0.0, centre - half), min(1.0, centre + half), n, True)


def clustered(problem_means: Sequence[float], *, is_binary: bool = False) -> MeanScore:
    """Normal interval over the mean score of each problem: samples of one problem are not independent."""
    n = len(problem_means)
    mean = sum(problem_means) / n
    variance = sum((x - mean) ** 2 for x in problem_means) / (n - 1) if n > 1 else 0.0
    half = Z_95 * math.sqrt(variance / n)
    low, high = mean - half, mean + half
    if all(0 <= x <= 1 for x in problem_means):
        low, high = max(0.0, low), min(1.0, high)
    return MeanScore(mean, low, high, n, is_binary)


def mean_score(rewards: Sequence[Sequence[float]]) -> MeanScore:
    """MeanScore of rewards [problems][samples]: Wilson for one 0/1 score per problem, else clustered."""
    is_binary = all(reward in (0.0, 1.0) for row in rewards for reward in row)
    if is_binary and all(len(row) == 1 for row in rewards):
        return wilson(sum(int(row[0]) for row in rewards), len(rewards))
    return clustered([sum(row) / len(row) for row in rewards], is_binary=is_binary)
