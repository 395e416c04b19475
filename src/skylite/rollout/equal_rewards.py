"""Notices a run in which no group can teach anything: all its rewards are equal."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

STEPS = 3
"""Steps without a signal, from which the user is warned; again each time their number has doubled."""


@dataclass(slots=True)
class EqualRewards:
    """Counts the steps in a row whose groups all had equal rewards."""

    steps: int = 0

    def after(self, metrics: Mapping[str, Any]) -> str:
        """Whether to warn after a step with these metrics: the sentence, or empty."""
        share = metrics.get("groups/zero_std_sampled_frac", 0.0)
        self.steps = self.steps + 1 if share is not None and share >= 1 else 0
        doublings = math.log2(self.steps / STEPS) if self.steps >= STEPS else -1.0
        return self.text(metrics) if doublings >= 0 and doublings.is_integer() else ""

    def text(self, metrics: Mapping[str, Any]) -> str:
        """What is wrong, and where to look."""
        reward = metrics.get("reward/sampled_mean", metrics.get("reward/mean"))
        mean = f", {reward:.3g} on average" if isinstance(reward, float) else ""
        return (
            f"in each of the last {self.steps} steps all rewards within a group were equal{mean}: the policy "
            "learns nothing from them. `skylite samples` shows what the reward got"
        )
