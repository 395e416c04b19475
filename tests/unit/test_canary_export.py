"""The check of an export: the base in its place is refused, or its move is too small to tell."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from skylite.adapters.manifest import Canary
from skylite.errors import RunFailed
from skylite.export.canary_check import Check, check_export

N = 46
Array = np.ndarray


def canary(seed: int, move: float) -> tuple[Canary, Array, Array, np.random.Generator]:
    rng = np.random.default_rng(seed)
    base = -rng.exponential(2.0, N)
    policy = base + rng.normal(0, move, N)
    found = Canary(
        sequences=[[0] * (N + 1)], policy_logprobs=[policy.tolist()], base_logprobs=[base.tolist()]
    )
    return found, policy, base, rng


def outcome(logprobs: Array, known: Canary, **given: Array) -> Check | None:
    """The check, or None if it refused."""
    rows: dict[str, Any] = {name: [row.tolist()] for name, row in given.items()}
    try:
        return check_export("w", "p", [logprobs.tolist()], known, is_exact=bool(given), **rows)
    except RunFailed:
        return None


@pytest.mark.parametrize("move", [1e-4, 1e-3, 0.01, 0.1])
def test_the_bare_base_in_16_bits_is_refused_or_too_small_to_tell(move: float) -> None:
    """The program rounds by 0.05 nats, as vLLM does in bfloat16."""
    found = []
    for seed in range(100):
        known, _, base, rng = canary(seed, move)
        found.append(outcome(base + rng.normal(0, 0.05, N), known))
    passed = [check for check in found if check is not None]
    assert not any(check.is_verified or check.note for check in passed)
    if move == 0.1:
        assert not passed


@pytest.mark.parametrize("move", [1e-4, 1e-3, 0.01, 0.1, 0.5])
def test_a_right_export_in_16_bits_passes(move: float) -> None:
    found = []
    for seed in range(200):
        known, policy, _, rng = canary(seed, move)
        found.append(outcome(policy + rng.normal(0, 0.05, N), known))
    passed = [check for check in found if check is not None]
    assert len(passed) == 200
    share = sum(check.is_verified for check in passed) / len(passed)
    assert share > 0.9 if move >= 0.1 else share == 0.0


def test_the_bare_base_in_rounded_weights_is_refused() -> None:
    """What rounding leaves of the move is known, so that rounding cannot be blamed for what is missing."""
    for seed in range(100):
        known, policy, base, rng = canary(seed, 0.01)
        rounded = policy + rng.normal(0, 0.005, N)
        noise = rng.normal(0, 1e-5, N)
        right = outcome(rounded + noise, known, rounded=rounded, base=base + noise)
        assert right is not None
        assert right.is_verified
        assert outcome(base + noise, known, rounded=rounded, base=base + noise) is None


def test_what_rounding_took_is_a_note_of_its_own() -> None:
    known, policy, base, _ = canary(0, 0.01)
    half = base + 0.5 * (policy - base)
    check = outcome(half, known, rounded=half, base=base)
    assert check is not None
    assert check.projection == pytest.approx(0.5)
    assert "keep 50 %" in check.note
    nothing = outcome(base, known, rounded=base, base=base)
    assert nothing is not None
    assert not nothing.is_verified


def test_the_bare_base_in_float32_is_refused_whatever_the_move() -> None:
    """A limit of 0.002 nats let every smaller move pass."""
    for seed in range(100):
        known, policy, base, rng = canary(seed, 5e-4)
        noise = rng.normal(0, 1e-5, N)
        assert outcome(policy + noise, known, base=base + noise) is not None
        assert outcome(base + noise, known, base=base + noise) is None
