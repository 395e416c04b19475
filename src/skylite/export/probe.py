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

from skylite.engine.canary_kinds import Floats, least_squares, rms
from skylite.errors import ModelError
from skylite.export.canary_check import flat, load_float32, model_logprobs

SEQUENCES, TOKENS = 8, 48
"""How many short texts are scored, and their tokens."""
DEPTHS = (0, 64, 256, 1024, 4096, 16384)
"""Where the parts of the long text begin, in tokens."""
ROUNDING_LIMIT = 0.1
"""Largest mean difference in nats between two programs that compute the same model, one in 16 bits."""
MAX_NOISE = 3.0
"""An adapter leaves at most this many times the base's differences unexplained."""
NEAR, STANDARD_ERRORS, TOLD = 0.1, 3.0, 0.25
"""A factor is right within NEAR or its STANDARD_ERRORS; one whose error is over TOLD tells nothing."""
ALPHAS = (0.5, 2.0, 0.25, 4.0)
"""Factors of all kinds from which the fit may start, besides 1, 0, and each kind left out."""
STEPS, DIFFERENCE, CONVERGED = 8, 0.05, 1e-3
"""Most steps of the fit, the change of a factor that shows its effect, and the change that ends it."""
WORTH = 0.9
"""So does a step that leaves more than this part of what the one before left: what no factors explain."""


@dataclass(frozen=True, slots=True)
class Share:
    """How much of an adapter's part is applied: 1 is all. NaN if it does not move the logprobs."""

    share: float
    error: float
    """Its standard error."""

    @property
    def is_told(self) -> bool:
        return self.error <= TOLD

    @property
    def is_right(self) -> bool:
        return abs(self.share - 1) <= max(NEAR, STANDARD_ERRORS * self.error)

    def __str__(self) -> str:
        return f"{self.share:.3f} +- {self.error:.2g}" if self.is_told else "too small to tell"


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


def judge(model: AdaptedModel, short: list[list[int]], long: list[int], server: ServerScores) -> Probe:
    """Compare a server's logprobs with the model's."""
    kinds = model.kinds
    right, base = (model.logprobs(short, dict.fromkeys(kinds, x)) for x in (1.0, 0.0))

    def compute(factors: Floats) -> Floats:
        return model.logprobs(short, dict(zip(kinds, factors, strict=True)))

    known = {(1.0,) * len(kinds): right, (0.0,) * len(kinds): base}
    factors, errors, unexplained = fit(compute, server.short, len(kinds), known)
    noise = None if server.base_short is None else rms(server.base_short - base)
    found = Probe(
        kinds={k: Share(f, e) for k, f, e in zip(kinds, factors.tolist(), errors.tolist(), strict=True)},
        depths=by_depth(model, long, server),
        moved=rms(right - base),
        gap=rms(server.short - right),
        unexplained=unexplained,
        noise=noise,
        base_gap=None if server.base_short is None else float(np.abs(server.base_short - base).mean()),
    )
    return with_verdict(found)


def fit(
    compute: Callable[[Floats], Floats],
    seen: Floats,
    num_kinds: int,
    known: dict[tuple[float, ...], Floats] | None = None,
) -> tuple[Floats, Floats, float]:
    """The factors [K] with which `compute` explains `seen` [T] best.

    Also their standard errors, and the root mean square of what they leave unexplained. Gauss-Newton steps
    from the best start, while they explain more.
    """
    cache = dict(known or {})

    def at(factors: Floats) -> Floats:
        key = tuple(factors.tolist())
        if key not in cache:
            cache[key] = compute(factors)
        return cache[key]

    ones, zeros = np.ones(num_kinds), np.zeros(num_kinds)
    best = min((ones, zeros), key=lambda x: rms(seen - at(x)))
    if not is_close(seen - at(best), at(ones) - at(zeros)):
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
    return best, errors, rms(seen - at(best))


def is_close(rest: Floats, move: Floats) -> bool:
    """Whether little of an adapter's move is unexplained."""
    return rms(rest) < 0.1 * rms(move)


def effect_of(at: Callable[[Floats], Floats], factors: Floats, index: int) -> Floats:
    """[T] the change of the logprobs with a factor, per unit."""
    less = factors.copy()
    less[index] -= DIFFERENCE
    return (at(factors) - at(less)) / DIFFERENCE


def by_depth(model: AdaptedModel, long: list[int], server: ServerScores) -> dict[str, Share]:
    """The share of the whole adapter that is applied in each part of the long text."""
    right, base = (model.logprobs([long], dict.fromkeys(model.kinds, x)) for x in (1.0, 0.0))
    seen = server.long - (base if server.base_long is None else server.base_long)
    found = {}
    for start, end in zip(DEPTHS, (*DEPTHS[1:], len(long)), strict=True):
        part = slice(start, min(end, len(right)))
        if len(right[part]) >= DEPTHS[1] // 2:
            change, error = least_squares((right - base)[part, None], seen[part])
            found[f"{start + 1} to {part.stop + 1}"] = Share(float(change[0]), float(error[0]))
    return found


def with_verdict(probe: Probe) -> Probe:
    """The probe with what it means, the worst first."""
    told = [share for share in probe.kinds.values() if share.is_told]
    wrong = {kind: share for kind, share in probe.kinds.items() if share.is_told and not share.is_right}
    noise = probe.noise if probe.noise is not None else ROUNDING_LIMIT
    mean = float(np.mean([share.share for share in told])) if told else np.nan
    is_common = len(told) > 1 and all(
        abs(s.share - mean) <= max(NEAR * abs(mean), STANDARD_ERRORS * s.error, 0.02) for s in told
    )
    deep = [part for part, share in probe.depths.items() if share.is_told and not share.is_right]
    if probe.base_gap is not None and probe.base_gap > ROUNDING_LIMIT:
        verdict = f"another base: its logprobs differ by {probe.base_gap:.2g} nats on average"
    elif probe.unexplained > max(MAX_NOISE * noise, 1e-4) and probe.unexplained > 0.1 * probe.gap:
        what = "adapter or version" if probe.noise is not None else "adapter, version or base"
        verdict = f"another {what}: {probe.unexplained:.2g} nats are not explained by any part of this one"
    elif not told:
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
    else:
        return replace(probe, verdict="applied", is_applied=True)
    return replace(probe, verdict=verdict)
