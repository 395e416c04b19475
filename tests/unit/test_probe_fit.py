"""How much of each kind of module's LoRA explains a server's logprobs, on three that interact."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np
import pytest

from skylite.engine.canary_kinds import Floats, least_squares
from skylite.export.probe import Probe, ServerScores, Share, by_depth, fit, judge, with_verdict

TOKENS, NOISE = 300, 0.02
RANDOM = np.random.default_rng(0)
LINEAR, SQUARE = RANDOM.normal(size=(TOKENS, 3)), 0.15 * RANDOM.normal(size=(TOKENS, 3, 3))


def compute(factors: Floats) -> Floats:
    result: Floats = LINEAR @ factors + np.einsum("tij,i,j->t", SQUARE, factors, factors)
    return result


@pytest.mark.parametrize("true", [(1, 1, 1), (0, 0, 0), (1, 0, 1), (0.5, 0.5, 0.5), (0, 1, 0), (3, 3, 3)])
def test_the_fit_finds_the_factors_and_the_noise(true: tuple[float, ...]) -> None:
    seen = compute(np.array(true, dtype=float)) + NOISE * np.random.default_rng(1).normal(size=TOKENS)
    found = fit(compute, seen, 3)
    assert np.abs(found.factors - true).max() < 4 * found.errors.max() < 0.01
    assert np.sqrt(np.square(found.rest).mean()) == pytest.approx(NOISE, rel=0.1)


def test_least_squares_by_hand() -> None:
    """y = 2 a with a = (1, 2, 2), the last off by 0.9: 2 + 0.9 * 2 / 9. The other kind has no effect."""
    a = np.array([1.0, 2.0, 2.0])
    change, errors = least_squares(np.stack([a, 0 * a], axis=1), 2 * a + np.array([0, 0, 0.9]))
    rest = 2 * a + np.array([0, 0, 0.9]) - 2.2 * a
    assert change.tolist() == pytest.approx([2.2, 0])
    # White's errors: each token's own rest, with 3 / (3 - 2) for three tokens and two kinds.
    assert errors.tolist() == pytest.approx([np.sqrt(3 * np.square(a / 9 * rest).sum()), np.inf])


RIGHT, WEAK = Share(1.0, 0.06), Share(-3.0, 2.0)
PROBE = Probe(
    kinds={"q_proj": RIGHT, "v_proj": RIGHT},
    depths={"1 to 65": RIGHT, "65 to 257": WEAK},
    moved=0.5,
    gap=0.02,
    unexplained=0.02,
    noise=0.02,
    base_gap=0.01,
    same_errors=0.3,
)


def verdict(**changes: object) -> str:
    return with_verdict(replace(PROBE, **changes)).verdict  # type: ignore[arg-type]


def test_the_verdict_names_the_worst_fault() -> None:
    half, none = Share(0.5, 0.06), Share(0.01, 0.06)
    assert verdict() == "applied"
    assert verdict(base_gap=0.5, unexplained=0.5).startswith("another base: ")
    assert verdict(same_errors=0.9).startswith("another base: ")
    assert (
        verdict(same_errors=0.9, noise=1e-5, unexplained=1e-5) == "applied"
    )  # the arithmetic of another program
    assert verdict(same_errors=0.9, moved=0.01) == "applied"  # the same bits, nearly: the adapter is small
    assert verdict(unexplained=0.07, gap=0.4).startswith("another adapter or version: ")
    assert verdict(unexplained=0.4, gap=0.4, noise=None).startswith("another adapter, version or base: ")
    assert verdict(kinds={"q_proj": WEAK}, depths={"1 to 65": WEAK}).startswith("too small to tell: ")
    assert verdict(kinds={"q_proj": WEAK}) == "applied as a whole; too small to tell alone: q_proj"
    assert verdict(kinds={"q_proj": half, "v_proj": half}).startswith("applied 0.50 times")
    assert verdict(kinds={"q_proj": none, "v_proj": none}).startswith("not applied: ")
    assert verdict(kinds={"q_proj": RIGHT, "v_proj": none}).startswith("applied in part: v_proj 0.01 ")
    assert (
        verdict(depths={"1 to 65": RIGHT, "65 to 257": none})
        == "not applied in tokens 65 to 257 of a long text"
    )


class LinearModel:
    """An adapter whose four kinds move each token by 0.15 nats."""

    kinds = ("down_proj", "k_proj", "q_proj", "v_proj")
    short, long = [[0] * 49] * 8, [0] * 1024
    base = RANDOM.normal(size=384 + 1023)
    effects = 0.15 * RANDOM.normal(size=(384 + 1023, 4))

    def logprobs(self, sequences: Sequence[Sequence[int]], factors: Mapping[str, float]) -> Floats:
        tokens = sum(len(ids) - 1 for ids in sequences)
        result: Floats = (self.base + self.effects @ [factors[k] for k in self.kinds])[:tokens]
        return result


def served(base_shift: float = 0.0, **factors: float) -> Probe:
    """The verdict on a server in bfloat16, which loses a tenth of the adapter to rounding."""
    model, noise = LinearModel(), np.random.default_rng(3)
    shift = base_shift * noise.normal(size=len(model.base))
    applied = model.effects @ [0.9 * factors.get(k, 1.0) for k in model.kinds]
    scores = [model.base + shift + x + 0.055 * noise.normal(size=len(shift)) for x in (applied, 0.0)]
    parts = [part for s in scores for part in (s[:384], s[384:])]
    return judge(model, model.short, model.long, ServerScores(*parts))  # type: ignore[arg-type]


def test_a_server_that_rounds_is_told_from_one_that_is_wrong() -> None:
    assert served().verdict == "applied"
    assert served(k_proj=0.0).verdict.startswith("applied in part: k_proj ")
    assert served(k_proj=0.0, down_proj=0.0, q_proj=0.0, v_proj=0.0).verdict.startswith("not applied: ")
    halved = served(**dict.fromkeys(LinearModel.kinds, 0.5))
    assert halved.verdict.startswith("applied 0.45 times")
    assert served(base_shift=0.1).verdict.startswith("another base")


def test_the_share_of_a_depth_by_hand() -> None:
    """Moves of 1 and 2 in turn, of which 0.5 and 1 are seen: a half, without an error."""
    move = np.tile([1.0, 2.0], 100)
    found = by_depth(move, move / 2, rounding=0.1)
    assert [*found] == ["1 to 65", "65 to 201"]
    share = found["1 to 65"]
    assert share.share == pytest.approx(0.5)
    # 0.05, and what rounding takes: 0.4 of it by the root mean square of the moves.
    assert share.limit == pytest.approx(0.05 + 0.4 * 0.1 / np.sqrt(2.5))
    assert share.is_wrong
