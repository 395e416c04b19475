"""Judges each step's rollouts as a large canary: the trainer's logprobs of them against the engine's.

trainer/rollout_gaps.py measures. In float32 the limit is the noise of the canary. In bfloat16 rounding
depends on the model and the depth of the context. So the first step, sampled from an adapter that equals the
base, gives a second limit: gaps that grow afterwards come from the adapter, or from a policy that became less
certain. So growth only warns. Error rates: benchmarks/NOTES.md, "Rollouts as a canary".

Consumes: a step's gaps by depth of context. Waits for: nothing.
Produces: a warning, or SyncFailed. Unblocks: nothing; only a second such step on end stops the run.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from skylite.engine.canary_limits_float32 import MIN_NOISE
from skylite.errors import SyncFailed

logger = logging.getLogger(__name__)

MIN_TOKENS = {"float32": 8, "bfloat16": 64}
"""A depth with fewer tokens is not judged by itself."""
MAX_NOISE = {"float32": 5.0, "bfloat16": 3.0}
"""Limit on the mean gap at any depth, in mean gaps of the base on the canary.

In bfloat16 the trainer rounds the rollouts, too, but not the canary."""
STOPS = {"float32": 1.0, "bfloat16": 2.0}
"""Gaps of this many limits stop the run. In bfloat16 right adapters stayed below 0.6 limits."""
MAX_GROWTH = 1.3
"""Limit in bfloat16 on the mean gap of all tokens, in those of the first judged step.

Right adapters stayed below."""
GROWTH_TOKENS = 500
"""Fewer tokens give no growth."""

ROUNDED = {"float32": 0.001, "bfloat16": 1 / 64}
"""Each limit also allows for this share of the adapter's mean move: both sides round its products, too."""

Bins = Sequence[Mapping[str, Any]]


@dataclass(slots=True)
class RolloutJudge:
    """Warns at the first step whose rollouts part from the trainer, and stops the run at the next."""

    dtype: Literal["float32", "bfloat16"]
    temperature: float
    action: Literal["stop", "warn"]
    reference: float = math.nan
    """Mean gap of the first judged step; NaN before it."""
    warned_at: int = 0
    """The last judged step, if its mismatch can stop the run; else 0."""
    _said: set[str] = field(default_factory=set)

    def judge(self, step: int, bins: Bins, noise: float, moved: float = 0.0) -> str:
        """A warning, or "". Raises SyncFailed if the judged step before had one, too.

        Args:
            noise: mean |engine - trainer| of the base on the canary, in nats.
            moved: mean |adapter - base| on the canary.
        """
        fault, is_sure = self.fault(bins, noise, moved)
        mean, tokens = mean_gap(bins)
        if not fault and math.isnan(self.reference) and tokens >= GROWTH_TOKENS:
            self.reference = mean
        warned, self.warned_at = self.warned_at, step if is_sure else 0
        if not fault:
            return ""
        where = f"the engine and the trainer disagree about the sampled tokens of step {step}: {fault}"
        if warned and is_sure and self.action == "stop":
            raise SyncFailed(
                f"In two steps on end {where}.",
                "They do not compute the same model at this depth of context, or the engine applies the "
                "adapter in part. Compare their settings for windows and positions; "
                "sync.rollout_mismatch=warn trains on.",
            )
        return where

    def say_once(self, text: str) -> None:
        """Log a sentence unless it was logged before."""
        if text not in self._said:
            self._said.add(text)
            logger.info(text)

    def fault(self, bins: Bins, noise: float, moved: float) -> tuple[str, bool]:
        """Where the two part, or "", and whether that can stop the run."""
        allowed = ROUNDED[self.dtype] * moved
        # A lower temperature stretches the logits, and their noise.
        limit = (MAX_NOISE[self.dtype] * max(noise, MIN_NOISE) + allowed) / min(1.0, self.temperature)
        for row in bins:
            if row["tokens"] >= MIN_TOKENS[self.dtype] and not row["gap_mean"] <= limit:
                is_sure = not row["gap_mean"] <= STOPS[self.dtype] * limit
                return (
                    f"from a context of {row['from']} tokens on, by {row['gap_mean']:.2g} nats on average "
                    f"(limit {limit:.2g}); most, {row['gap_max']:.2g}, at token {row['worst_depth']} of "
                    f"prompt {row['worst_prompt']}"
                ), is_sure
        mean, tokens = mean_gap(bins)
        is_judged = self.dtype == "bfloat16" and tokens >= GROWTH_TOKENS
        if is_judged and mean > MAX_GROWTH * self.reference + allowed / min(1.0, self.temperature):
            worst = max(bins, key=lambda row: float(row["gap_mean"]))
            return (
                f"by {mean:.2g} nats on average, and by {self.reference:.2g} in the first step, when the "
                f"adapter was new; most from a context of {worst['from']} tokens on, as in prompt "
                f"{worst['worst_prompt']}"
            ), False
        return "", False


def mean_gap(bins: Iterable[Mapping[str, Any]]) -> tuple[float, int]:
    """(mean over all tokens, their number)."""
    rows = list(bins)
    tokens = sum(row["tokens"] for row in rows)
    return (sum(row["gap_mean"] * row["tokens"] for row in rows) / tokens if tokens else math.nan), tokens
