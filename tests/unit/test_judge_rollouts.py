"""A mismatch in the rollouts warns, and stops the run in the next step, with the depth and the prompt."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest

from skylite.errors import SyncFailed
from skylite.rollout.judge_rollouts import RolloutJudge, mean_gap

NOISE = 1e-5


def judge(dtype: Literal["float32", "bfloat16"] = "float32", **given: Any) -> RolloutJudge:
    values: dict[str, Any] = {"temperature": 1.0, "action": "stop"}
    return RolloutJudge(dtype, **(values | given))


def row(start: int, gap: float, tokens: int = 1000) -> dict[str, Any]:
    return {
        "from": start, "tokens": tokens, "gap_mean": gap, "gap_max": 4 * gap,
        "worst_depth": start + 3, "worst_prompt": f"gsm8k/train/{start}",
    }  # fmt: skip


def test_gaps_like_the_noise_pass() -> None:
    own = judge()
    for step in range(1, 20):
        assert own.judge(step, [row(0, NOISE), row(64, 4.9 * NOISE)], NOISE) == ""


def test_the_first_depth_over_the_limit_warns_and_the_next_step_stops_with_depth_and_prompt() -> None:
    own = judge()
    bins = [row(0, NOISE), row(64, 0.05), row(128, 0.1)]
    warning = own.judge(1, bins, NOISE)
    assert "from a context of 64 tokens on" in warning
    with pytest.raises(SyncFailed, match=r"64 tokens on.* at token 67 of prompt gsm8k/train/64"):
        own.judge(2, bins, NOISE)


def test_a_step_without_a_mismatch_forgets_the_warning() -> None:
    own = judge()
    for step, gap in enumerate((1.0, NOISE, 1.0, NOISE), start=1):
        assert bool(own.judge(step, [row(0, gap)], NOISE)) == (gap == 1.0)


def test_the_action_warn_never_stops() -> None:
    own = judge(action="warn")
    assert all(own.judge(step, [row(0, 1.0)], NOISE) for step in range(1, 5))


def test_a_low_temperature_stretches_the_noise() -> None:
    assert judge(temperature=0.5).judge(1, [row(0, 9.9 * NOISE)], NOISE) == ""
    assert judge(temperature=0.5).judge(1, [row(0, 10.1 * NOISE)], NOISE) != ""
    assert judge(temperature=2.0).judge(1, [row(0, 5.1 * NOISE)], NOISE) != ""


def test_a_large_move_is_rounded_too() -> None:
    assert judge().judge(1, [row(0, 6 * NOISE)], NOISE) != ""
    assert judge().judge(1, [row(0, 6 * NOISE)], NOISE, moved=0.02) == ""
    own = judge("bfloat16", reference=0.004)
    assert own.judge(2, [row(64, 0.006)], 0.004, moved=0.3) == ""
    assert own.judge(3, [row(64, 0.006)], 0.004, moved=0.01) != ""


def test_a_depth_with_few_tokens_is_not_judged() -> None:
    assert judge().judge(1, [row(64, 1.0, tokens=7)], NOISE) == ""
    assert judge().judge(1, [row(64, 1.0, tokens=8)], NOISE) != ""


@pytest.mark.parametrize("gap", [math.nan, math.inf])
def test_a_gap_that_is_no_number_is_a_mismatch(gap: float) -> None:
    assert judge().judge(1, [row(0, gap)], NOISE) != ""


def test_in_bfloat16_gaps_that_grow_after_the_first_step_come_from_the_adapter() -> None:
    own = judge("bfloat16")
    assert own.judge(1, [row(64, 0.05)], 0.05) == ""
    assert own.reference == 0.05
    assert own.judge(2, [row(64, 0.064)], 0.05) == ""
    assert "0.05 in the first step" in own.judge(3, [row(64, 0.066)], 0.05)
    assert own.judge(4, [row(64, 0.066)], 0.05) != "", "a policy that became less certain grows, too"
    assert own.reference == 0.05


def test_in_bfloat16_only_a_gross_mismatch_stops() -> None:
    own = judge("bfloat16")
    assert all(own.judge(step, [row(64, 0.29)], 0.05) for step in (1, 2, 3))
    assert own.judge(4, [row(64, 0.31)], 0.05) != ""
    with pytest.raises(SyncFailed):
        own.judge(5, [row(64, 0.31)], 0.05)


def test_a_resumed_run_keeps_the_reference() -> None:
    own = judge("bfloat16", reference=0.05)
    assert own.judge(9, [row(64, 0.08)], 0.05) != ""
    assert own.reference == 0.05


def test_few_tokens_give_no_reference_and_no_growth() -> None:
    own = judge("bfloat16")
    assert own.judge(1, [row(64, 0.01, tokens=400)], 0.05) == ""
    assert math.isnan(own.reference)
    own = judge("bfloat16", reference=0.01)
    assert own.judge(2, [row(64, 0.05, tokens=400)], 0.05) == ""


def test_the_mean_of_all_depths_counts_tokens() -> None:
    assert mean_gap([row(0, 1.0, tokens=10), row(64, 4.0, tokens=20)]) == (3.0, 30)
    assert mean_gap([])[1] == 0


def test_rounding_with_heavy_tails_stops_no_run() -> None:
    """500 runs of 20 steps with 640 tokens each, their gaps clipped as rollout_gaps.py does."""
    rng, stopped = np.random.default_rng(0), 0
    for _ in range(500):
        own = judge("bfloat16")
        gaps = np.abs(rng.standard_t(2.5, (20, 640))) * 0.035
        clipped = np.minimum(gaps, 10 * gaps.mean(axis=1, keepdims=True)).mean(axis=1)
        try:
            for step, gap in enumerate(clipped, start=1):
                own.judge(step, [row(64, float(gap), tokens=640)], 0.05)
        except SyncFailed:
            stopped += 1
    assert stopped == 0
