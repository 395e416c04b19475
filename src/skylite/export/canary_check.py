"""Checks an exported model: its logprobs on the run's canary must equal those of the trainer."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skylite.adapters.manifest import Canary
from skylite.engine.canary import compare_logprobs
from skylite.errors import RunFailed

TOLERANCE = 0.002  # as for the engines of a run in float32
"""Largest difference of a logprob in nats, when weights and arithmetic are float32."""
ROUNDING_LIMIT = 0.1
"""Largest mean difference in nats of weights that were rounded to 16 bits."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Check:
    """What a canary showed about an exported model."""

    what: str
    """Such as `merged weights in bfloat16`."""
    by: str
    """What computed the logprobs."""
    tokens: int
    gap_max: float
    """max |export - trainer| in nats."""
    gap_mean: float
    base_distance: float
    """mean |trainer - base| in nats: how far training moved the logprobs."""
    projection: float | None
    """How much of that move the export has; None if the adapter did not move them."""
    note: str = ""

    def __str__(self) -> str:
        moved = "" if self.projection is None else f", {100 * self.projection:.1f} % of the adapter's move"
        return (
            f"{self.what}, computed by {self.by}: logprobs of {self.tokens} canary tokens differ from the "
            f"trainer's by {self.gap_mean:.2g} nats on average, {self.gap_max:.2g} at most{moved}"
        )


def check_export(
    what: str, by: str, logprobs: Sequence[Sequence[float]], canary: Canary, *, is_exact: bool
) -> Check:
    """Compare logprobs [S][L - 1] with the canary. Raises RunFailed if the export is another model.

    `is_exact`: weights and arithmetic are float32. Otherwise rounding is allowed for.
    """
    own, policy, base = flat(logprobs), flat(canary.policy_logprobs), flat(canary.base_logprobs)
    reading = compare_logprobs(own, policy, base)
    has_moved = reading.base_distance > 4 * reading.gap_mean
    limit = f"{TOLERANCE} at most" if is_exact else f"{ROUNDING_LIMIT} on average"
    is_near = reading.gap_max <= TOLERANCE if is_exact else reading.gap_mean <= ROUNDING_LIMIT
    if not is_near or (has_moved and not 0.5 < reading.projection < 1.5):
        raise RunFailed(
            f"The {what} compute other logprobs than the trainer ({by}): {reading.gap_mean:.3g} nats on "
            f"average, {reading.gap_max:.3g} at most (allowed: {limit}), and {reading.projection:.2f} of the "
            "adapter's move (expected 1.00). Nothing was written.",
            "Report this with the versions of torch, transformers and peft.",
        )
    note = ""
    if not is_exact and not has_moved and reading.base_distance > 0:
        note = (
            f"rounding changes logprobs by {reading.gap_mean:.2g} nats on average, and the adapter by only "
            f"{reading.base_distance:.2g}: part of the training is lost; --dtype float32 keeps it"
        )
    return Check(
        what=what,
        by=by,
        tokens=len(own),
        gap_max=reading.gap_max,
        gap_mean=reading.gap_mean,
        base_distance=reading.base_distance,
        projection=None if math.isnan(reading.projection) else reading.projection,
        note=note,
    )


def check_base(logprobs: Sequence[Sequence[float]], canary: Canary) -> None:
    """Raise RunFailed unless the base computes what it did for the trainer."""
    own, base = flat(logprobs), flat(canary.base_logprobs)
    gap = max(abs(a - b) for a, b in zip(own, base, strict=True))
    if not gap <= TOLERANCE:
        raise RunFailed(
            f"The base model computes other logprobs than for the trainer: up to {gap:.3g} nats "
            f"(allowed: {TOLERANCE}). Nothing was written.",
            "Report this with the versions of torch and transformers.",
        )


def flat(rows: Sequence[Sequence[float]]) -> list[float]:
    return [x for row in rows for x in row]
