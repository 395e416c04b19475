"""The canary in float32: compares the engine's move with the trainer's, and both with measured noise.

The noise is the engine's own: its logprobs of the base against the trainer's, on the same tokens. A move is
the difference of an adapter's logprobs from the base's. An engine that serves something else makes another
move. The size of the gaps shows any other move that is clearly larger than the noise. The projections show a
move that is too short or too long, or that of the version before, also where it is not: they average the
noise of all tokens. What the noise hides is not verified: `CanaryReading.visible`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from skylite.engine.canary_limits_bf16 import Scores
from skylite.engine.canary_reading import CanaryReading, differences, mean_abs
from skylite.errors import SyncFailed

MIN_NOISE = 2e-6
"""In nats: a float32 logprob of -16 has no finer steps. A tiny model may show no noise at all."""
MAX_GAPS = 4.0
"""Limit on the root mean square of the gaps, in units of that of the base's gaps."""
MAX_STANDARD_ERRORS = 8.0
"""Limit on how far a projection is from its right value. More than usual: the tokens that gave the noise are
few, and their gaps are not independent."""
ROUNDED = 0.005
"""Both limits also allow for this share of the move: the engine rounds the adapter's products, too."""
MAX_VISIBLE = 0.1
"""A version is verified if a fault of this share of its move would be seen."""
WHOLE = 0.5
"""The projections tell a version from the base, or from the version before, if their limit is below this."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Float32Reading:
    """What the scores show."""

    reading: CanaryReading
    base_gap: float
    """max |engine - trainer| for the base."""
    gap_rms: float
    gap_limit: float
    projection_limit: float
    """How far the projection may be from 1."""
    towards_before: float
    """0 for this adapter, 1 for the version before; NaN if they do not differ or the engine served none."""
    before_limit: float
    """How far that may be from 0."""


def read_float32(scores: Scores) -> Float32Reading:
    """Compare an engine's logprobs with the trainer's."""
    gaps = differences(scores.engine, scores.policy)
    own = differences(scores.engine_base, scores.base)
    move = differences(scores.policy, scores.base)
    noise, size = max(_rms(own), MIN_NOISE), _rms(move)
    gap_limit = MAX_GAPS * noise + ROUNDED * size
    projection_limit = _projection_limit(noise, move)
    before = scores.policy_before or ()
    change = differences(before, scores.policy[: len(before)])
    before_limit = _projection_limit(noise, change)
    visible = gap_limit / size if size > 0 else math.inf
    told = projection_limit < WHOLE and (not before or before_limit < WHOLE)
    reading = CanaryReading(
        gap_max=max(map(abs, gaps)),
        gap_mean=mean_abs(gaps),
        base_distance=mean_abs(move),
        # The base's gaps are subtracted: what both sides always round differently is no move.
        projection=1 + _along(differences(gaps, own), move),
        rounding=mean_abs(own),
        visible=visible,
        is_verified=visible <= MAX_VISIBLE and told,
    )
    return Float32Reading(
        reading=reading,
        base_gap=max(map(abs, own)),
        gap_rms=_rms(gaps),
        gap_limit=gap_limit,
        projection_limit=projection_limit,
        towards_before=_along(differences(gaps, own)[: len(change)], change),
        before_limit=before_limit,
    )


def check_float32(name: str, engine: str, found: Float32Reading, tolerance: float) -> None:
    """Raise SyncFailed unless the engine samples from this adapter, as far as its noise lets that be seen."""
    reading = found.reading
    wrong = f"{engine} does not sample from the adapter {name} that the trainer published: "
    facts = f"(noise {reading.rounding:.2g} nats; the adapter is {reading.base_distance:.2g} from the base)"
    if not found.base_gap <= tolerance:
        raise SyncFailed(
            f"{engine} and the trainer disagree about the base model: canary logprobs differ by up to "
            f"{found.base_gap:.4f} nats (tolerance {tolerance:g}).",
            "They do not compute the same model. Compare the versions of the engine and transformers.",
        )
    if not reading.gap_max <= tolerance:
        raise SyncFailed(
            f"{wrong}canary logprobs differ by up to {reading.gap_max:.4f} nats, tolerance {tolerance:g} "
            f"{facts}.",
            "The engine serves other weights than the trainer's, or sync.canary_tolerance is too small.",
        )
    if abs(reading.projection - 1) > found.projection_limit:  # NaN for an adapter that equals the base
        raise SyncFailed(
            f"{wrong}its canary logprobs moved {reading.projection:.2f} of the way from the base to the "
            f"adapter, expected 1 +- {found.projection_limit:.2g} {facts}.",
            "The engine serves other weights than the trainer's, or only a part of them. Read its log.",
        )
    if abs(found.towards_before) > found.before_limit:
        raise SyncFailed(
            f"{wrong}its canary logprobs are {found.towards_before:.2f} of the way to the version before, "
            f"expected 0 +- {found.before_limit:.2g} {facts}.",
            "The engine serves an older version. Read its log.",
        )
    if not found.gap_rms <= found.gap_limit:
        raise SyncFailed(
            f"{wrong}canary logprobs differ by {found.gap_rms:.2g} nats (root mean square), "
            f"more than the limit of {found.gap_limit:.2g} that the base's noise gives {facts}.",
            "The engine serves other weights than the trainer's, or only a part of them. Read its log.",
        )


def _projection_limit(noise: float, move: Sequence[float]) -> float:
    energy = sum(d * d for d in move)
    # sqrt(2): both the adapter's and the base's gaps are noisy.
    return MAX_STANDARD_ERRORS * math.sqrt(2 / energy) * noise + ROUNDED if energy > 0 else math.inf


def _along(values: Sequence[float], move: Sequence[float]) -> float:
    """<values, move> / |move|^2; NaN for no move."""
    energy = sum(d * d for d in move)
    return sum(v * d for v, d in zip(values, move, strict=True)) / energy if energy > 0 else math.nan


def _rms(values: Sequence[float]) -> float:
    return math.sqrt(sum(v * v for v in values) / len(values)) if values else 0.0
