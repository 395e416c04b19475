"""The results of an evaluation together: metrics, comparisons and the learning curve."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any, Literal

import numpy as np

from skylite.config.rollout import RewardParameters
from skylite.evaluation.confidence_interval import score_name
from skylite.evaluation.evaluate import EvalResult
from skylite.evaluation.summary import lines_of, metrics_of, scores_of, with_interval
from skylite.evaluation.versions import Subject

CURVE_WIDTH = 30


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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """The result of one subject on one data set."""

    subject: Subject
    data: str
    result: EvalResult


@dataclass(slots=True, kw_only=True)
class Report:
    """Collects results and renders them."""

    model: str
    difficulty: list[int]
    data: Mapping[str, str]
    """Name -> folder."""
    rewards: Mapping[str, str]
    """Name of the data set -> spec of the reward that measures accuracy."""
    parameters: Mapping[str, RewardParameters]
    """Name of the data set -> settings of that reward."""
    split: str
    seed: int
    results: list[Scored] = field(default_factory=list)

    def add(self, scored: Scored) -> None:
        """Keep the results in the order of data set, base, step."""
        self.results.append(scored)
        order = list(self.data)
        self.results.sort(key=lambda r: (order.index(r.data), _place(r.subject)))

    def facts_of(self, scored: Scored) -> dict[str, Any]:
        """One result as JSON."""
        return {
            "adapter": scored.subject.name,
            "version": None if scored.subject.adapter is None else scored.subject.version,
            "model": self.model,
            "data": self.data[scored.data],
            "split": self.split,
            "difficulty": self.difficulty,
            "seed": self.seed,
            **metrics_of(self.with_one_name(scored), self.rewards[scored.data], self.parameters[scored.data]),
        }

    def with_one_name(self, scored: Scored) -> EvalResult:
        """The result. One partial score on a data set makes the means of all its results rewards."""
        same = [found.result.score for found in self.results if found.data == scored.data]
        is_binary = all(score.is_binary for score in [scored.result.score, *same])
        return replace(scored.result, score=replace(scored.result.score, is_binary=is_binary))

    def as_json(self) -> dict[str, Any]:
        """All results and comparisons."""
        compared = [(scored, self.compared(scored)) for scored in self.results]
        return {
            "results": [self.facts_of(scored) for scored in self.results],
            "comparisons": [
                {
                    "data": self.data[scored.data],
                    "adapter": scored.subject.name,
                    "baseline": self.baseline(scored.data).subject.name,
                    **asdict(found),
                }
                for scored, found in compared
                if found is not None
            ],
        }

    def baseline(self, data: str) -> Scored:
        """What the others are compared with: the base if it was evaluated, else the oldest version."""
        return next(scored for scored in self.results if scored.data == data)

    def compared(self, scored: Scored) -> Comparison | None:
        """The result against the baseline's on the problems that both have; None for the baseline."""
        baseline = self.baseline(scored.data)
        if scored is baseline:
            return None
        ours, theirs = [
            dict(zip([g.prompt.id for g in r.groups], scores_of(r), strict=True))
            for r in (scored.result, baseline.result)
        ]
        both = [problem for problem in ours if problem in theirs]
        return compare([ours[p] for p in both], [theirs[p] for p in both], self.seed) if both else None

    def text(self) -> str:
        """All results for a person."""
        return "\n\n".join(self._text_of(name) for name in self.data)

    def _text_of(self, data: str) -> str:
        results = [scored for scored in self.results if scored.data == data]
        lines: list[str] = []
        for scored in results:
            lines.append(f"{scored.subject.name} on {data} ({self.split})")
            lines += lines_of(self.facts_of(scored))
            if (found := self.compared(scored)) is not None:
                lines.append(f"  against {self.baseline(data).subject.name}: {found}")
        if len(results) > 2:
            lines += ["", *self._curve(results)]
        return "\n".join(lines)

    def _curve(self, results: list[Scored]) -> list[str]:
        """The learning curve: a bar and an interval for each version."""
        name = max(len(r.subject.name) for r in results)
        first = self.facts_of(results[0])
        is_binary = first["score"] == score_name(is_binary=True)
        lines = [f"learning curve ({first['score']}, 95 % interval)"]
        largest = 1.0 if is_binary else max(abs(r.result.score.mean) for r in results) or 1.0
        for scored in results:
            facts = self.facts_of(scored)
            bar = "█" * round(CURVE_WIDTH * min(1.0, max(0.0, facts["mean"] / largest)))
            value = with_interval({k: facts[k] for k in ("mean", "low", "high")}, is_binary)
            lines.append(f"  {scored.subject.name:{name}}  {bar:{CURVE_WIDTH}}  {value}")
        return lines


def _place(subject: Subject) -> int:
    return -1 if subject.adapter is None else subject.version
