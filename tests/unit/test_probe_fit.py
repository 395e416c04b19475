"""How much of each kind of module's LoRA explains a server's logprobs, on three that interact."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from skylite.engine.canary_kinds import Floats, least_squares
from skylite.export.probe import Probe, Share, fit, with_verdict

TOKENS, NOISE = 300, 0.02
RANDOM = np.random.default_rng(0)
LINEAR, SQUARE = RANDOM.normal(size=(TOKENS, 3)), 0.15 * RANDOM.normal(size=(TOKENS, 3, 3))


def compute(factors: Floats) -> Floats:
    result: Floats = LINEAR @ factors + np.einsum("tij,i,j->t", SQUARE, factors, factors)
    return result


@pytest.mark.parametrize("true", [(1, 1, 1), (0, 0, 0), (1, 0, 1), (0.5, 0.5, 0.5), (0, 1, 0), (3, 3, 3)])
def test_the_fit_finds_the_factors_and_the_noise(true: tuple[float, ...]) -> None:
    seen = compute(np.array(true, dtype=float)) + NOISE * np.random.default_rng(1).normal(size=TOKENS)
    factors, errors, unexplained = fit(compute, seen, 3)
    assert np.abs(factors - true).max() < 4 * errors.max() < 0.01
    assert unexplained == pytest.approx(NOISE, rel=0.1)


def test_least_squares_by_hand() -> None:
    """y = 2 a with a = (1, 2, 2), the last off by 0.9: 2 + 0.9 * 2 / 9. The other kind has no effect."""
    a = np.array([1.0, 2.0, 2.0])
    change, errors = least_squares(np.stack([a, 0 * a], axis=1), 2 * a + np.array([0, 0, 0.9]))
    rest = 2 * a + np.array([0, 0, 0.9]) - 2.2 * a
    assert change.tolist() == pytest.approx([2.2, 0])
    # White's errors: each token's own rest, with 3 / (3 - 2) for three tokens and two kinds.
    assert errors.tolist() == pytest.approx([np.sqrt(3 * np.square(a / 9 * rest).sum()), np.inf])


RIGHT, WEAK = Share(1.0, 0.01), Share(-3.0, 2.0)
PROBE = Probe(
    kinds={"q_proj": RIGHT, "v_proj": WEAK},
    depths={"1 to 65": RIGHT, "65 to 257": WEAK},
    moved=0.5,
    gap=0.02,
    unexplained=0.02,
    noise=0.02,
    base_gap=0.01,
)


def verdict(**changes: object) -> str:
    return with_verdict(replace(PROBE, **changes)).verdict  # type: ignore[arg-type]


def test_the_verdict_names_the_worst_fault() -> None:
    half, none = Share(0.5, 0.01), Share(0.01, 0.01)
    assert verdict() == "applied"
    assert verdict(base_gap=0.5, unexplained=0.5).startswith("another base: ")
    assert verdict(unexplained=0.07, gap=0.4).startswith("another adapter or version: ")
    assert verdict(unexplained=0.4, gap=0.4, noise=None).startswith("another adapter, version or base: ")
    assert verdict(kinds={"q_proj": WEAK}).startswith("too small to tell")
    assert verdict(kinds={"q_proj": half, "v_proj": half}).startswith("applied 0.50 times")
    assert verdict(kinds={"q_proj": none, "v_proj": none}).startswith("not applied: ")
    assert verdict(kinds={"q_proj": RIGHT, "v_proj": none}).startswith("applied in part: v_proj 0.01 ")
    assert (
        verdict(depths={"1 to 65": RIGHT, "65 to 257": none})
        == "not applied in tokens 65 to 257 of a long text"
    )
