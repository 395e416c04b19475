"""pass@k, votes and paired tests, against hand-made numbers."""

from __future__ import annotations

from dataclasses import replace
from itertools import combinations
from typing import Any

import numpy as np
import pytest

from skylite.config.rollout import RewardParameters
from skylite.evaluation.confidence_interval import mean_score
from skylite.evaluation.evaluate import EvalResult
from skylite.evaluation.results import bootstrap_p, compare, mcnemar_exact
from skylite.evaluation.scores import answer_of, can_vote, ks_for, majority_score, pass_at_k
from skylite.evaluation.summary import metrics_of
from skylite.rewards.math import closed_box
from skylite.types import Call, Group, Prompt, Trajectory


def test_pass_at_k_by_hand() -> None:
    # 5 samples, 2 right: of the 10 pairs, 3 hold no right one.
    assert pass_at_k(5, 2, 2) == pytest.approx(0.7)
    assert pass_at_k(5, 2, 1) == pytest.approx(0.4)
    assert pass_at_k(5, 2, 4) == 1.0
    assert pass_at_k(5, 0, 5) == 0.0


@pytest.mark.parametrize("num_correct", range(7))
@pytest.mark.parametrize("k", range(1, 7))
def test_pass_at_k_is_the_share_of_subsets_with_a_right_sample(num_correct: int, k: int) -> None:
    subsets = list(combinations(range(6), k))
    share = sum(min(subset) < num_correct for subset in subsets) / len(subsets)
    assert pass_at_k(6, num_correct, k) == pytest.approx(share)


@pytest.mark.parametrize("k", [0, 6])
def test_pass_at_k_needs_k_samples(k: int) -> None:
    with pytest.raises(ValueError, match=f"pass@{k} "):
        pass_at_k(5, 1, k)


def test_ks() -> None:
    assert [ks_for(n) for n in (1, 2, 6, 8)] == [[1], [1, 2], [1, 2, 4, 6], [1, 2, 4, 8]]


def test_the_majority_is_the_most_frequent_answer_and_the_first_of_equals() -> None:
    assert majority_score(["7", "8", "8", None], [1.0, 0.0, 0.0, 0.0]) == 0.0
    assert majority_score(["7", "8", "8", "7"], [1.0, 0.0, 0.0, 1.0]) == 1.0
    assert majority_score([None, None, "7"], [0.0, 0.0, 1.0]) == 1.0, "no answer is no vote"
    assert majority_score([None, None], [0.0, 0.0]) == 0.0


def test_equal_numbers_are_one_answer() -> None:
    assert answer_of("gsm8k", "#### 1,080.0") == answer_of("gsm8k", "so\n#### 1080") == "1080"
    assert answer_of("gsm8k", "1080") is None
    assert answer_of("reward.py:f", "#### 1080") is None


@pytest.mark.parametrize(
    ("settings", "texts", "votes"),
    [
        ({}, ["a  b\n", "a b", "A b"], ["a b", "a b", "A b"]),
        ({"ignore_case": True}, ["A b"], ["a b"]),
        ({"answer_pattern": "is (.+?)$"}, ["It is  7 ", "none"], ["7", None]),
        ({"answer_pattern": "is (.+?)$", "compare": "number"}, ["is 1,080.0", "is 1080", "is x"],
         ["1080", "1080", None]),
        ({"compare": "math"}, ["x + 1", "1 + x"], ["x+1", "1+x"]),
    ],
)  # fmt: skip
def test_votes_of_exact_match_follow_its_settings(
    settings: dict[str, Any], texts: list[str], votes: list[str | None]
) -> None:
    parameters = RewardParameters(**settings)
    assert [answer_of("exact_match", text, parameters) for text in texts] == votes
    assert can_vote("exact_match")
    assert not can_vote("regex")


def test_the_majority_of_exact_match_uses_the_settings_of_the_data() -> None:
    """Two of three say 7, one as " 7": the vote is right, and the mean of the scores is 2/3."""
    sample = Call(prompt_token_ids=[1], completion_token_ids=[2], sampling_logprobs=[-1.0], text="")
    prompt = Prompt(id="a", messages=[], answer="7", source="")
    said = (("it is 7", 1.0), ("it is  7", 1.0), ("it is 8", 0.0))
    trajectories = tuple(
        Trajectory(calls=(replace(sample, text=text),), reward=score) for text, score in said
    )
    result = EvalResult(
        model="m", temperature=1.0, score=mean_score([[score for _, score in said]]),
        completion_tokens_mean=1.0, truncated_frac=0.0,
        groups=[Group(prompt=prompt, trajectories=trajectories)],
    )  # fmt: skip
    found = metrics_of(result, "exact_match", RewardParameters(answer_pattern="is (.+)"))
    assert found["majority"]["mean"] == 1.0
    assert found["mean"] == pytest.approx(2 / 3)
    assert "majority" not in metrics_of(result, "regex", RewardParameters())


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (r"so \boxed{ \frac{1}{2} }.", r"\frac{1}{2}"),
        (r"\boxed{1} then \fbox{3} \boxed{2}", "2"),
        (r"\boxed{1} and \boxed{2", "1"),
        ("none", None),
    ],
)
def test_boxed(text: str, found: str | None) -> None:
    assert closed_box(text) == found
    assert answer_of("math", text) == found


def test_mcnemar_by_hand() -> None:
    # 2 * (C(12,0) + C(12,1) + C(12,2)) / 2^12
    assert mcnemar_exact(10, 2) == mcnemar_exact(2, 10) == pytest.approx(2 * (1 + 12 + 66) / 4096)
    assert mcnemar_exact(0, 0) == 1.0
    assert mcnemar_exact(3, 3) == 1.0
    assert 0 < mcnemar_exact(4000, 3000) < 1e-30


def test_single_right_or_wrong_answers_are_compared_by_mcnemar() -> None:
    model, base = [[1.0]] * 12 + [[0.0]] * 8, [[1.0]] * 2 + [[0.0]] * 16 + [[1.0]] * 2
    found = compare(model, base, seed=0)
    assert (found.test, found.only_model, found.only_baseline) == ("exact McNemar", 10, 2)
    assert found.p_value == pytest.approx(158 / 4096)
    assert found.difference == pytest.approx(8 / 20)
    # Differences of +1 (10), -1 (2), 0 (8): standard error sqrt(0.44 / 20) = 0.148.
    assert found.low == pytest.approx(0.4 - 1.96 * 0.148, abs=0.06)
    assert found.high == pytest.approx(0.4 + 1.96 * 0.148, abs=0.06)


def test_means_of_samples_are_compared_by_a_bootstrap_over_problems() -> None:
    rng = np.random.default_rng(0)
    base = (rng.random((400, 4)) < 0.4).astype(float)
    better = (rng.random((400, 4)) < 0.6).astype(float)
    found = compare(better.tolist(), base.tolist(), seed=0)
    assert found.test == "paired bootstrap"
    assert found.p_value == pytest.approx(2 / 10_001)
    error = (better.mean(1) - base.mean(1)).std(ddof=1) / 20
    assert found.low == pytest.approx(found.difference - 1.96 * error, abs=0.005)
    same = compare(base.tolist(), base.tolist(), seed=0)
    assert (same.difference, same.p_value, same.only_model) == (0.0, 1.0, 0)


def test_the_bootstrap_is_calibrated_without_a_difference() -> None:
    """About 5 % of comparisons of equal models have p < 0.05."""
    rng = np.random.default_rng(1)
    found = [
        compare(rng.random((40, 1)).tolist(), rng.random((40, 1)).tolist(), seed=k).p_value for k in range(80)
    ]
    assert 1 <= sum(p < 0.05 for p in found) <= 10


def test_bootstrap_p_by_hand() -> None:
    # 1 of 9 resampled means is not above 0: 2 * (1 + 1) / (9 + 1).
    assert bootstrap_p(np.array([-0.1, *[0.2] * 8])) == pytest.approx(0.4)


def test_models_are_compared_on_the_same_problems() -> None:
    with pytest.raises(ValueError, match="1 and 2 problems"):
        compare([[1.0]], [[1.0], [0.0]], seed=0)
