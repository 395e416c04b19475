"""Simulated scores of a bfloat16 canary."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from skylite.engine.canary_bf16 import Scores, check_paired, read_paired
from skylite.errors import SyncFailed

N = 552
Array = np.ndarray


def rounding(rng: np.random.Generator) -> Array:
    """Heavy tails, as measured: mean 0.05 nats, a few beyond one."""
    return rng.standard_t(2.5, N) * 0.035


def scores(seed: int, size: float, engine_move: Callable[[Array, np.random.Generator], Array]) -> Scores:
    """An adapter that moves the logprobs by `size` (root mean square), and an engine that moves otherwise."""
    rng = np.random.default_rng(seed)
    base, move = -rng.exponential(2.0, N), rng.normal(0, size, N)
    return Scores(
        engine=(base + engine_move(move, rng) + rounding(rng)).tolist(),
        engine_base=(base + rounding(rng)).tolist(),
        policy=(base + move).tolist(),
        base=base.tolist(),
    )


def is_refused(found: Scores) -> bool:
    try:
        check_paired("policy-v000001", "engine-0", read_paired(found))
    except SyncFailed:
        return True
    return False
