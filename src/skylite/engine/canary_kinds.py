"""The canary by kind of module: which of them (q_proj, down_proj) an engine leaves out.

The trainer publishes what each kind's LoRA does to the canary's logprobs. How the engine's move differs from
the trainer's is explained by these effects as well as possible: a kind that needs -1 of its effect is left
out. Only a kind whose effect stands out from the noise is judged.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from skylite.engine.canary_limits_bf16 import CLIP, ROUNDED_AWAY, SLACK, Scores
from skylite.engine.canary_reading import KindShare
from skylite.errors import SyncFailed

Floats = NDArray[np.float64]
STANDARD_ERRORS = 6.0
"""Limit on how far a share is from 1. More than for the whole adapter: there are several kinds."""


def read_kinds(scores: Iterable[Scores]) -> dict[str, KindShare]:
    """Kind -> share of its LoRA that the engine applies, from all sequences that were scored with effects."""
    used = [s for s in scores if s.effects]
    if not used:
        return {}
    kinds = sorted(used[0].effects)
    effects = np.concatenate([np.stack([s.effects[k] for k in kinds], axis=1) for s in used])
    own = np.concatenate([np.subtract(s.engine_base, s.base) for s in used])
    rest = np.concatenate([np.subtract(s.engine, s.policy) for s in used]) - own
    if len(rest) <= len(kinds):
        return {}
    explained = effects @ least_squares(effects, rest)[0]
    clip = CLIP * float(np.median(np.abs(rest - explained)))
    change, errors = least_squares(effects, explained + np.clip(rest - explained, -clip, clip))
    limits = share_limits(STANDARD_ERRORS * errors, effects, float(np.abs(own).mean()))
    return {k: KindShare(float(1 + c), float(x)) for k, c, x in zip(kinds, change, limits, strict=True)}


def share_limits(errors: Floats, effects: Floats, rounding: float) -> Floats:
    """[K] how far shares may be from 1 by their errors [K], by effects [T, K] and a mean rounding in nats.

    As for the whole adapter, rounding takes the smallest products away.
    """
    sizes = np.maximum(np.sqrt(np.square(effects).mean(axis=0)), np.finfo(float).tiny)
    limits: Floats = errors + SLACK + ROUNDED_AWAY * rounding / sizes
    return limits


def check_kinds(name: str, engine: str, kinds: Mapping[str, KindShare]) -> None:
    """Raise SyncFailed if the engine leaves out a kind of module, or applies it with another factor."""
    if any(found.is_wrong for found in kinds.values()):
        raise SyncFailed(
            f"{engine} does not sample from the adapter {name} that the trainer published. "
            f"{explained_by(kinds)}",
            "Its LoRA does not cover these modules. Read its log, or leave them out of lora.target_modules.",
        )


def explained_by(kinds: Mapping[str, KindShare]) -> str:
    """A sentence on the kinds that are applied in part, or ""."""
    listed = ", ".join(f"{k} {f.share:.2f} +- {f.limit:.2g}" for k, f in kinds.items() if f.is_wrong)
    return f"Shares of LoRA that it applies, where 1 is right: {listed}." if listed else ""


def least_squares(effects: Floats, rest: Floats) -> tuple[Floats, Floats]:
    """The [K] changes that explain `rest` [T] best by effects [T, K], and their standard errors.

    The error of a kind without any effect is infinite, and its change 0. Errors: White (1980), with the
    factor T / (T - K) for few tokens.
    """
    scale = np.linalg.norm(effects, axis=0)
    unit = effects / np.where(scale > 0, scale, 1)
    inverse = np.linalg.pinv(unit, rcond=1e-5)
    change: Floats = inverse @ rest
    left = rest - unit @ change
    few = len(rest) / max(1, len(rest) - len(scale))
    errors = np.sqrt(few * np.square(inverse) @ np.square(left))
    scale = np.where(scale > 0, scale, np.nan)
    return np.nan_to_num(change / scale), np.nan_to_num(errors / scale, nan=np.inf)


def rms(values: Floats) -> float:
    """Root mean square."""
    return float(np.sqrt(np.square(values).mean()))
