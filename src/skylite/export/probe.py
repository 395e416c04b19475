"""Does a server that somebody else runs apply this adapter? To which modules, and how deep into a text?

A model in float32 here tells what the logprobs should be, for the adapter with every kind of module scaled by
any factor. The factors that explain the server's logprobs best are what it applies: 1 is right, 0 is a kind
that it leaves out, one factor for all is another alpha.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from skylite.engine.canary_kinds import Floats, least_squares, rms, share_limits
from skylite.engine.canary_limits_bf16 import MAX_STANDARD_ERRORS
from skylite.engine.canary_reading import KindShare
from skylite.errors import ModelError
from skylite.export.canary_check import TOLERANCE, flat, load_float32, model_logprobs

SEQUENCES, TOKENS = 8, 48
"""How many short texts are scored, and their tokens."""
DEPTHS = (0, 64, 256, 1024, 4096, 16384)
"""Where the parts of the long text begin, in tokens."""
ROUNDING_LIMIT, SAME_ERRORS = 0.1, 0.6
"""Two programs that compute the same model, one in 16 bits, differ by at most the first, on average in nats.
Their differences with the adapter and without it hardly correlate; those from another base do, above the
second."""
MAX_NOISE = 3.0
"""An adapter leaves at most this many times the base's differences unexplained."""
NEAR, TOLD = 0.1, 0.9
"""Shares under NEAR are those of a server that does not apply the adapter. One with a limit over TOLD tells
nothing."""
ALPHAS = (0.5, 2.0, 0.25, 4.0)
"""Factors of all kinds from which the fit may start, besides 1, 0, and each kind left out."""
STEPS, DIFFERENCE, CONVERGED = 8, 0.05, 1e-3
"""Most steps of the fit, the change of a factor that shows its effect, and the change that ends it."""
CLOSE, CLOSE_NOISE = 0.1, 2.0
"""A start is good that leaves less than this part of the adapter's move, or this many times the noise."""
WORTH = 0.9
"""So does a step that leaves more than this part of what the one before left: what no factors explain."""


class Share(KindShare):
    """How much of a part of an adapter the server applies. It counts if its lack would be seen."""

    @property
    def is_told(self) -> bool:
        return self.limit < TOLD


@dataclass(frozen=True, slots=True, kw_only=True)
class Probe:
    """What was found. Differences are root mean squares in nats, but for `base_gap`."""

    kinds: dict[str, Share]
    """Kind of module -> how much of its LoRA the server applies."""
    depths: dict[str, Share]
    """Tokens of the long text -> how much of the whole adapter it applies there."""
    moved: float
    """Adapter from base, computed here."""
    gap: float
    """Server from adapter."""
    unexplained: float
    """Server from the adapter with the factors of `kinds`."""
    noise: float | None
    """Server's base from base; None if it does not serve its base beside the adapter."""
    base_gap: float | None
    """The same, mean absolute difference."""
    same_errors: float | None
    """Correlation of the server's differences with the adapter and without it: 1 if both are of its base."""
    verdict: str = ""
    """In words; `is_applied` sums it up."""
    is_applied: bool = False


class AdaptedModel:
    """A base in float32 with an adapter whose kinds of modules can be scaled."""

    def __init__(self, base: Path, adapter: Path) -> None:
        """Raises ModelError if they cannot be loaded or do not fit."""
        from peft import PeftModel
        from peft.tuners.tuners_utils import BaseTunerLayer

        model = load_float32(base)
        try:
            self.model = PeftModel.from_pretrained(model, str(adapter)).eval()
        except (RuntimeError, ValueError, KeyError, OSError) as error:
            raise ModelError(
                f"PEFT cannot put {adapter} on {base}: {type(error).__name__} {str(error)[:300]}.",
                "Give the base model that the adapter was trained on with --base.",
            ) from None
        self._layers: dict[str, list[tuple[Any, str, float]]] = {}
        for name, layer in self.model.named_modules():
            if isinstance(layer, BaseTunerLayer):
                kind = next(part for part in reversed(name.split(".")) if part != "base_layer")
                found = [(layer, key, scale) for key, scale in layer.scaling.items()]
                self._layers.setdefault(kind, []).extend(found)

    @property
    def kinds(self) -> list[str]:
        """Last names of the modules with LoRA."""
        return sorted(self._layers)

    def logprobs(self, sequences: Sequence[Sequence[int]], factors: Mapping[str, float]) -> Floats:
        """[tokens] logprobs of all tokens but each first, with the LoRA of each kind times its factor."""
        for kind, layers in self._layers.items():
            for layer, key, scale in layers:
                layer.scaling[key] = scale * factors[kind]
        return np.array(flat(model_logprobs(self.model, sequences)), dtype=np.float64)


def probe_text(seed: int = 0) -> str:
    """Text without end for a probe: small problems, each with other numbers."""
    rng = random.Random(seed)
    names, things = (
        ("Mia", "Tom", "Ada", "Ben", "Zoe", "Ian"),
        ("apples", "books", "stamps", "coins", "shells"),
    )
    lines = []
    for _ in range(4000):
        name, thing, a, b = rng.choice(names), rng.choice(things), rng.randint(2, 99), rng.randint(2, 99)
        verb, total = rng.choice([("buys", a + b), ("finds", a + b), ("is given", a + b)])
        lines.append(f"{name} has {a} {thing} and {verb} {b} more. Now {name} has {total} {thing}.")
    return " ".join(lines)


def sequences_of(token_ids: Sequence[int], depth: int) -> tuple[list[list[int]], list[int]]:
    """SEQUENCES short sequences from all over the text, and its beginning of `depth` tokens."""
    step = max(1, (len(token_ids) - TOKENS) // SEQUENCES)
    short = [list(token_ids[i * step : i * step + TOKENS]) for i in range(SEQUENCES)]
    return short, list(token_ids[:depth])


@dataclass(frozen=True, slots=True)
class ServerScores:
    """[tokens] logprobs of the server for the short sequences and the long one."""

    short: Floats
    long: Floats
    base_short: Floats | None = None
    """None: it does not serve its base beside the adapter."""
    base_long: Floats | None = None

    @property
    def all(self) -> Floats:
        """The short ones, then the long one."""
        return np.concatenate([self.short, self.long])

    @property
    def base(self) -> Floats | None:
        """The same of the base."""
        if self.base_short is None or self.base_long is None:
            return None
        return np.concatenate([self.base_short, self.base_long])


def judge(model: AdaptedModel, short: list[list[int]], long: list[int], server: ServerScores) -> Probe:
    """Compare a server's logprobs with the model's."""
    kinds, texts, tokens = model.kinds, [*short, long], len(server.short)
    right, base = (model.logprobs(texts, dict.fromkeys(kinds, x)) for x in (1.0, 0.0))
    gap, own = server.all - right, None if server.base is None else server.base - base
    # A server that rounds needs more tokens, and costs several times the time.
    if own is not None and rms(own) <= TOLERANCE:
        texts = short
    used = slice(tokens if texts is short else None)

    def compute(factors: Floats) -> Floats:
        return model.logprobs(texts, dict(zip(kinds, factors, strict=True)))

    known = {(1.0,) * len(kinds): right[used], (0.0,) * len(kinds): base[used]}
    found = fit(compute, server.all[used], len(kinds), known, 0.0 if own is None else rms(own))
    rounding = float(np.abs(found.rest if own is None else own).mean())
    limits = share_limits(MAX_STANDARD_ERRORS * found.errors, found.effects, rounding)
    shares = zip(found.factors.tolist(), limits.tolist(), strict=True)
    move = (right - base)[tokens:]
    seen = server.long - (base[tokens:] if server.base_long is None else server.base_long)
    return with_verdict(
        Probe(
            kinds={k: Share(*share) for k, share in zip(kinds, shares, strict=True)},
            depths=by_depth(move, seen, rounding),
            moved=rms(right - base),
            gap=rms(gap),
            unexplained=rms(found.rest),
            noise=None if own is None else rms(own),
            base_gap=None if own is None else rounding,
            same_errors=None if own is None else correlation(gap, own),
        )
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """The factors that explain a server's logprobs best."""

    factors: Floats
    """[K]"""
    errors: Floats
    """[K] standard errors."""
    effects: Floats
    """[T, K] of a change by 1."""
    rest: Floats
    """[T] what they leave unexplained."""


def fit(
    compute: Callable[[Floats], Floats],
    seen: Floats,
    num_kinds: int,
    known: dict[tuple[float, ...], Floats] | None = None,
    noise: float = 0.0,
) -> Fitted:
    """The factors [K] with which `compute` explains `seen` [T] best, where `noise` (rms) is never explained.

    Gauss-Newton steps from the best start, while they explain more.
    """
    cache = dict(known or {})

    def at(factors: Floats) -> Floats:
        key = tuple(factors.tolist())
        if key not in cache:
            cache[key] = compute(factors)
        return cache[key]

    ones, zeros = np.ones(num_kinds), np.zeros(num_kinds)
    best = min((ones, zeros), key=lambda x: rms(seen - at(x)))
    # All of the adapter or nothing, but for the noise and little else: no need for another start.
    if rms(seen - at(best)) > max(CLOSE * rms(at(ones) - at(zeros)), CLOSE_NOISE * noise):
        others = [np.full(num_kinds, x) for x in ALPHAS] + [ones - one for one in np.eye(num_kinds)]
        best = min((best, *others), key=lambda x: rms(seen - at(x)))
    for _ in range(STEPS):
        effects = np.stack([effect_of(at, best, k) for k in range(num_kinds)], axis=1)
        rest = seen - at(best)
        change, errors = least_squares(effects, rest)
        better = best + change
        left = rms(seen - at(better))
        if left >= rms(rest):
            break
        best = better
        if left > WORTH * rms(rest) or (np.abs(change) < np.maximum(CONVERGED, errors / 4)).all():
            break
    return Fitted(factors=best, errors=errors, effects=effects, rest=seen - at(best))


def effect_of(at: Callable[[Floats], Floats], factors: Floats, index: int) -> Floats:
    """[T] the change of the logprobs with a factor, per unit."""
    less = factors.copy()
    less[index] -= DIFFERENCE
    return (at(factors) - at(less)) / DIFFERENCE


def by_depth(move: Floats, seen: Floats, rounding: float) -> dict[str, Share]:
    """The share of the adapter's move [L - 1] that is seen in each part of the long text."""
    found = {}
    for start, end in zip(DEPTHS, (*DEPTHS[1:], len(move) + 1), strict=True):
        part = slice(start, min(end, len(move)))
        if len(move[part]) >= DEPTHS[1] // 2:
            effects = move[part, None]
            change, errors = least_squares(effects, seen[part])
            limits = share_limits(MAX_STANDARD_ERRORS * errors, effects, rounding)
            found[f"{start + 1} to {part.stop + 1}"] = Share(float(change[0]), float(limits[0]))
    return found


def correlation(a: Floats, b: Floats) -> float:
    """Of two series around 0; 0 if one is 0."""
    size = float(np.linalg.norm(a) * np.linalg.norm(b))
    return float(a @ b) / size if size else 0.0


def has_another_base(probe: Probe) -> bool:
    """Whether the server's differences are more than rounding, or there with and without the adapter."""
    if probe.base_gap is None or probe.noise is None or probe.same_errors is None:
        return False
    is_same = TOLERANCE < probe.noise < probe.moved and probe.same_errors > SAME_ERRORS
    return probe.base_gap > ROUNDING_LIMIT or is_same


def with_verdict(probe: Probe) -> Probe:
    """The probe with what it means, the worst first."""
    told = [share for share in probe.kinds.values() if share.is_told]
    wrong = {kind: share for kind, share in probe.kinds.items() if share.is_wrong}
    noise = probe.noise if probe.noise is not None else ROUNDING_LIMIT
    mean = float(np.average([s.share for s in told], weights=[s.limit**-2 for s in told])) if told else np.nan
    is_common = len(told) > 1 and all(abs(s.share - mean) <= max(NEAR * abs(mean), s.limit) for s in told)
    deep = [part for part, share in probe.depths.items() if share.is_wrong]
    untold = [kind for kind, share in probe.kinds.items() if not share.is_told]
    if has_another_base(probe):
        verdict = f"another base: its logprobs differ by {probe.base_gap:.2g} nats on average"
    elif probe.unexplained > max(MAX_NOISE * noise, 1e-4) and probe.unexplained > 0.1 * probe.gap:
        what = "adapter or version" if probe.noise is not None else "adapter, version or base"
        verdict = f"another {what}: {probe.unexplained:.2g} nats are not explained by any part of this one"
    elif not told and not any(share.is_told for share in probe.depths.values()):
        verdict = (
            "too small to tell: the adapter hardly moves these logprobs; give it texts of its task (--text)"
        )
    elif is_common and wrong and abs(mean) < NEAR:
        verdict = "not applied: the server samples the base"
    elif is_common and wrong:
        verdict = f"applied {mean:.2f} times: it uses another alpha, or another scaling (rsLoRA)"
    elif wrong:
        names = ", ".join(f"{kind} {share.share:.2f}" for kind, share in wrong.items())
        verdict = f"applied in part: {names} (1 is right, 0 is left out)"
    elif deep:
        verdict = f"not applied in tokens {', '.join(deep)} of a long text"
    elif untold:
        verdict = f"applied as a whole; too small to tell alone: {', '.join(untold)}"
        return replace(probe, verdict=verdict, is_applied=True)
    else:
        return replace(probe, verdict="applied", is_applied=True)
    return replace(probe, verdict=verdict)
