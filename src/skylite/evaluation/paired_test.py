"""Compares two models on the same problems."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

RESAMPLES = 10_000
_CHUNK = 500
"""Resamples drawn at once, to bound the memory."""

Test = Literal["exact McNemar", "paired bootstrap"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The mean score of one model minus that of the baseline, on the same problems."""

    test: Test
    difference: float
    low: float
    """95 % interval of the difference, from a paired bootstrap over problems."""
    high: float
    p_value: float
    """Two-sided. Not corrected for the number of comparisons."""
    only_model: int
    """Problems with a higher score than the baseline's."""
    only_baseline: int
    """Problems with a lower score."""

    def __str__(self) -> str:
        return (
            f"{100 * self.difference:+.1f} points (95 % interval {100 * self.low:+.1f} to "
            f"{100 * self.high:+.1f}), p = {self.p_value:.2g} by {self.test}; "
            f"better on {self.only_model} problems, worse on {self.only_baseline}"
        )


def compare(model: Sequence[Sequence[float]], baseline: Sequence[Sequence[float]], seed: int) -> Comparison:
    """Compare scores [problems][samples]. Raises ValueError for different numbers of problems.

    Exact McNemar if every problem has one score of 0 or 1, else a paired bootstrap of the problems' means.
    """
    if len(model) != len(baseline):
        raise ValueError(f"{len(model)} and {len(baseline)} problems are not paired")
    differences = np.array([_mean(m) - _mean(b) for m, b in zip(model, baseline, strict=True)])
    means = _resampled_means(differences, seed)
    low, high = np.percentile(means, [2.5, 97.5])
    better, worse = int((differences > 0).sum()), int((differences < 0).sum())
    is_binary = all(len(row) == 1 and row[0] in (0.0, 1.0) for rows in (model, baseline) for row in rows)
    return Comparison(
        test="exact McNemar" if is_binary else "paired bootstrap",
        difference=float(differences.mean()),
        low=float(low),
        high=float(high),
        p_value=mcnemar_exact(better, worse) if is_binary else bootstrap_p(means),
        only_model=better,
        only_baseline=worse,
    )


def mcnemar_exact(better: int, worse: int) -> float:
    """Two-sided p of `better` and `worse` discordant pairs: binomial with chance 1/2, doubled, at most 1."""
    total = better + worse
    tail = sum(math.comb(total, i) for i in range(min(better, worse) + 1))
    p_value: float = 2 * tail / 2**total
    return min(1.0, p_value)


def bootstrap_p(means: np.ndarray) -> float:
    """Two-sided p that the mean difference is 0, from resampled means: at least 2 / (resamples + 1)."""
    least = min(int((means <= 0).sum()), int((means >= 0).sum()))
    return min(1.0, 2 * (least + 1) / (len(means) + 1))


def _resampled_means(differences: np.ndarray, seed: int) -> np.ndarray:
    rng, count = np.random.default_rng(seed), len(differences)
    chunks = range(RESAMPLES // _CHUNK)
    return np.concatenate([differences[rng.integers(0, count, (_CHUNK, count))].mean(1) for _ in chunks])


def _mean(scores: Sequence[float]) -> float:
    return sum(scores) / len(scores)
