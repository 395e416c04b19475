"""The canary in bfloat16: tells a wrong adapter from rounding.

A bfloat16 model rounds each logprob by some hundredths of a nat, and a few by one nat or more. An adapter
moves them by a hundredth in its first step. So no limit on single gaps can judge. The rule compares two moves
over all tokens: of the engine, from its own logprobs of the base to those of the adapter, and of the trainer,
which scores the canary in float32. The few tokens of one version show little, so a version is also judged
together with those before it: an engine that applies adapters in part does so to all. Error rates:
benchmarks/NOTES.md, "The canary in bfloat16".
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from skylite.engine.canary_reading import CanaryReading, differences, mean_abs
from skylite.errors import SyncFailed

CLIP, CLIP_GAPS = 3.0, 10.0
"""Differences of the two moves are clipped at CLIP medians, and gaps at CLIP_GAPS medians of the base's gaps:
one token must not decide."""
MAX_STANDARD_ERRORS = 4.0
SLACK = 0.05
ROUNDED_AWAY, MOST_ROUNDED_AWAY = 0.4, 0.6
"""How far the projection may be from 1: this many standard errors, SLACK, and what rounding takes from a
small move. A layer adds the adapter's product to an output that is rounded already, so the smallest
products vanish: about ROUNDED_AWAY times rounding / move, and at most MOST_ROUNDED_AWAY."""
MAX_GAP_RATIO, MOVE_ROUNDING = 1.4, 1 / 64
"""Limit on the mean clipped gap with the adapter: MAX_GAP_RATIO times that without it, or for few tokens
MAX_GAP_ERRORS standard errors above it, plus MOVE_ROUNDING times the mean move, because the engine rounds the
adapter's products, too."""
MAX_GAP_ERRORS = 6.0
"""More than MAX_STANDARD_ERRORS: the gaps of a sequence's tokens are not independent."""
MAX_ROUNDING = 1.0
"""Largest mean gap of the base in nats. Larger than in the trainer, because engines round the logits too."""
MOVED = 0.02
"""An adapter whose logprobs differ by this share of the rounding cannot give the same bits as another."""
SAME_TOKENS, SAME_AT_LEAST, MOVED_CLEARLY = 0.02, 3, 0.2
"""The same weights give at least the first share of the tokens the same bits, also beside other requests. Two
adapters give hardly any, and fewer than SAME_AT_LEAST tokens, if their logprobs differ by the last share of
the rounding. Rounding may hide a smaller difference: then only all bits count."""
MAX_VISIBLE = 0.5
"""A version is verified if its scores would show that half its move is missing. Rounding hides smaller faults
for many steps."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Scores:
    """Logprobs of the canary's tokens, [N] each; of the version before the first M of them."""

    engine: Sequence[float]
    engine_base: Sequence[float]
    policy: Sequence[float]
    """The trainer's, in float32."""
    base: Sequence[float]
    engine_before: Sequence[float] | None = None
    """[M] with the version before, if the engine has served one."""
    policy_before: Sequence[float] | None = None
    """[M]"""
    effects: Mapping[str, Sequence[float]] = field(default_factory=dict)
    """Kind of module -> [N] what its LoRA does to the logprobs; empty where the version has none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairedReading:
    """What the scores show."""

    reading: CanaryReading
    projection_limit: float
    """How far the projection may be from 1."""
    clipped_gap: float
    """Mean gap with the adapter, clipped."""
    gap_limit: float
    """Its limit, from the base's clipped gaps."""
    same_as: str
    """"the base" or "the version before" if the engine gave the same bits although the adapter moved."""
    same_tokens: dict[str, float]
    """Share of tokens with the same bits as the base and, if there is one, the version before."""
    is_told_apart: bool
    """Whether the adapter differs enough from both for their bits to show."""


def joined(scores: Iterable[Scores]) -> Scores:
    """The scores of several sequences as one, first those that have a version before."""
    ordered = sorted(scores, key=lambda s: s.engine_before is None)
    return Scores(
        engine=[x for s in ordered for x in s.engine],
        engine_base=[x for s in ordered for x in s.engine_base],
        policy=[x for s in ordered for x in s.policy],
        base=[x for s in ordered for x in s.base],
        engine_before=[x for s in ordered for x in s.engine_before or ()] or None,
        policy_before=[x for s in ordered for x in s.policy_before or ()] or None,
    )


def read_paired(scores: Scores) -> PairedReading:
    """Compare the engine's move with the trainer's."""
    gaps = differences(scores.engine, scores.policy)
    own = differences(scores.engine_base, scores.base)
    moved = differences(scores.policy, scores.base)
    rounding, energy = mean_abs(own), sum(d * d for d in moved)
    projection = error = limit = math.nan
    if energy > 0:
        # (engine - engine_base) - (policy - base): 0 but for two roundings.
        rest = [gap - o for gap, o in zip(gaps, own, strict=True)]
        rest = _clipped_at(rest, CLIP * statistics.median(map(abs, rest)))
        products = [r * d for r, d in zip(rest, moved, strict=True)]
        projection = 1 + sum(products) / energy
        # The sandwich estimator: tokens with larger moves round differently (White 1980, eq. 2).
        error = math.sqrt(sum(x * x for x in products)) / energy
        vanished = ROUNDED_AWAY * rounding / math.sqrt(energy / len(moved))
        limit = MAX_STANDARD_ERRORS * error + SLACK + min(vanished, MOST_ROUNDED_AWAY)
    reading = CanaryReading(
        gap_max=max(map(abs, gaps)),
        gap_mean=mean_abs(gaps),
        base_distance=mean_abs(moved),
        projection=projection,
        rounding=rounding,
        projection_error=error,
    )
    clip = CLIP_GAPS * statistics.median(map(abs, own)) or math.inf  # 0: the base is not rounded at all
    clipped, own = _clipped_at(gaps, clip), _clipped_at(own, clip)
    growth = [abs(gap) - abs(o) for gap, o in zip(clipped, own, strict=True)]
    slack = MAX_GAP_ERRORS * statistics.pstdev(growth) / math.sqrt(len(growth))
    gap_limit = mean_abs(own) + max((MAX_GAP_RATIO - 1) * mean_abs(own), slack)
    same_tokens = _same_tokens(scores)
    same_as = _same_as(scores, same_tokens, rounding)
    return PairedReading(
        reading=reading,
        projection_limit=limit,
        clipped_gap=mean_abs(clipped),
        gap_limit=gap_limit + MOVE_ROUNDING * reading.base_distance,
        same_as=same_as,
        same_tokens=same_tokens,
        is_told_apart=all(
            _distance(scores.policy, other) > MOVED_CLEARLY * rounding
            for other in (scores.base, scores.policy_before)
            if other is not None
        ),
    )


def read_together(scores: Iterable[Scores]) -> PairedReading:
    """Compare moves of several versions as if they were one. Bits show something only within a version."""
    return replace(read_paired(joined(scores)), same_as="")


def check_paired(name: str, engine: str, found: PairedReading) -> None:
    """Raise SyncFailed unless the engine samples from this adapter, as far as rounding lets it be seen."""
    reading = found.reading
    facts = f"(projection {reading.projection:.2f} +- {reading.projection_error:.2f}, mean gap "
    facts += f"{reading.gap_mean:.3f} with the adapter and {reading.rounding:.3f} without)"
    if not reading.rounding <= MAX_ROUNDING:
        raise SyncFailed(
            f"{engine} and the trainer disagree about the base model: canary logprobs differ by "
            f"{reading.rounding:.3f} nats on average (limit {MAX_ROUNDING}).",
            "They do not compute the same model. Compare the versions of the engine and transformers.",
        )
    if found.same_as:
        share = found.same_tokens[found.same_as]
        raise SyncFailed(
            f"{engine} does not sample from the adapter {name} that the trainer published: {share:.0%} of "
            f"the canary logprobs are those of {found.same_as}, to the bit.",
            "The adapter's tensors were not applied. Read the engine's log.",
        )
    if abs(reading.projection - 1) > found.projection_limit:  # NaN for an adapter that equals the base
        raise SyncFailed(
            f"{engine} does not sample from the adapter {name} that the trainer published: its logprobs "
            f"moved {reading.projection:.2f} of the way from base to adapter, "
            f"expected 1 +- {found.projection_limit:.2f} {facts}.",
            "The engine serves other weights than the trainer's, or only a part of them. Read its log.",
        )
    if not (math.isfinite(reading.gap_mean) and found.clipped_gap <= found.gap_limit):
        raise SyncFailed(
            f"{engine} does not sample from the adapter {name} that the trainer published: with it, the "
            f"canary logprobs differ more than rounding explains: by {found.clipped_gap:.3f} nats on average "
            f"without outliers, limit {found.gap_limit:.3f} {facts}.",
            "The engine serves other weights than the trainer's. Read its log.",
        )


def _same_tokens(scores: Scores) -> dict[str, float]:
    others = {"the base": scores.engine_base, "the version before": scores.engine_before}
    return {
        name: sum(a == b for a, b in zip(scores.engine[: len(other)], other, strict=True)) / len(other)
        for name, other in others.items()
        if other is not None
    }


def _same_as(scores: Scores, same_tokens: dict[str, float], rounding: float) -> str:
    policies = {"the base": scores.base, "the version before": scores.policy_before}
    for name, share in same_tokens.items():
        policy = policies[name]
        if policy is None or share < max(SAME_TOKENS, min(1, SAME_AT_LEAST / len(policy))):
            continue
        least = MOVED if share == 1 else MOVED_CLEARLY
        if _distance(scores.policy, policy) > least * rounding:
            return name
    return ""


def _distance(policy: Sequence[float], other: Sequence[float]) -> float:
    """Root mean square of the differences [M] of the first M tokens."""
    moves = differences(policy[: len(other)], other)
    return math.sqrt(sum(m * m for m in moves) / len(moves))


def _clipped_at(values: Sequence[float], limit: float) -> list[float]:
    return [max(-limit, min(limit, value)) for value in values]
