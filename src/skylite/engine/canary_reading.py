"""What a canary shows about an engine, and its metrics."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

MAX_KIND_LIMIT = 0.5
"""A kind of module is judged if half of it would be missed."""


@dataclass(frozen=True, slots=True)
class KindShare:
    """How much of a kind's LoRA the engine applies: 1 is all."""

    share: float
    limit: float
    """How far it may be from 1."""

    @property
    def is_told(self) -> bool:
        return self.limit < MAX_KIND_LIMIT

    @property
    def is_wrong(self) -> bool:
        return self.is_told and abs(self.share - 1) > self.limit


@dataclass(frozen=True, slots=True, kw_only=True)
class CanaryReading:
    """The logprobs of an engine on the canary, compared with the trainer's."""

    gap_max: float
    """max |engine - policy| in nats."""
    gap_mean: float
    base_distance: float
    """mean |policy - base| in nats: how far the adapter has moved from the base."""
    projection: float
    """<engine - base, policy - base> / |policy - base|^2: 1 for this adapter, 0 for the base.

    NaN while policy == base. In bfloat16 over the newest scores of all sequences (engine/canary.py).
    """
    rounding: float = math.nan
    """mean |engine - base| of the base in nats: the noise that every reading has."""
    projection_error: float = math.nan
    """Standard error of the projection, in bfloat16 only."""
    visible: float = math.nan
    """The smallest share of the adapter's move that would be missed, infinite for no move."""
    is_verified: bool = False
    """Whether the adapter is told from the base and from the version before, and faults of parts would be
    seen. Otherwise the move is too small to tell: nothing is wrong, but little is shown."""

    kinds: Mapping[str, KindShare] = field(default_factory=dict)
    """Kind of module -> how much of it is applied; empty for a version without effects."""

    @property
    def verdict(self) -> str:
        """In words."""
        return verdict_of(self.is_verified)

    def as_metrics(self) -> dict[str, float]:
        """The reading as metrics, without those that are not defined."""
        metrics = {
            "canary/gap_max": self.gap_max,
            "canary/gap_mean": self.gap_mean,
            "canary/base_distance": self.base_distance,
        }
        optional = {
            "canary/projection": self.projection,
            "canary/rounding": self.rounding,
            "canary/projection_error": self.projection_error,
            "canary/visible_frac": self.visible,
        }
        if not math.isnan(self.gap_max):
            metrics["canary/verified"] = float(self.is_verified)
        metrics |= {f"canary/kind/{kind}": found.share for kind, found in self.kinds.items() if found.is_told}
        return metrics | {name: value for name, value in optional.items() if math.isfinite(value)}


TOO_SMALL = "too small to tell"


def verdict_of(verified: float | None) -> str:
    """What the metric canary/verified says; None or NaN: no reading."""
    if verified is None or math.isnan(verified):
        return "not checked"
    return "verified" if verified else TOO_SMALL


def differences(a: Sequence[float], b: Sequence[float]) -> list[float]:
    """a - b, element by element. Raises ValueError if their lengths differ."""
    return [x - y for x, y in zip(a, b, strict=True)]


def mean_abs(values: Sequence[float]) -> float:
    return sum(map(abs, values)) / len(values)
