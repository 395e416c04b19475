"""The alarms: made-up runs that went wrong raise theirs, a healthy one raises none, and the rules' edges."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from skylite.evaluation.confidence_interval import mean_score, wilson
from skylite.report.alarms import change_of, constant_reward, find_alarms, held_out_gain
from skylite.report.html import read_completions
from skylite.report.read_run import HeldOut, read_facts
from tests.made_up_runs import STEPS, write_made_up_run

FINE = {
    "policy/entropy": 1.0,
    "groups/zero_std_sampled_frac": 0.3,
    "completion/tokens_mean": 20.0,
    "reward/right_frac": 0.5,
    "mismatch/logprob_diff_mean": 1e-5,
    "mismatch/ess_frac": 1.0,
}


def steps(count: int, **series: Any) -> list[dict[str, Any]]:
    """Metrics of `count` steps: FINE, with the series as functions of the step. `__` stands for a slash."""
    made = {name.replace("__", "/"): function for name, function in series.items()}
    return [
        {"step": k, "reward/mean": 0.5, **FINE, **{name: f(k) for name, f in made.items()}}
        for k in range(1, count + 1)
    ]


def kinds(metrics: list[dict[str, Any]], *args: Any) -> list[str]:
    return [alarm.kind for alarm in find_alarms(metrics, *args)]


def held_out(version: int, correct: int, problems: int = 100) -> HeldOut:
    return HeldOut(version=version, label="step", score=wilson(correct, problems), path=Path("x"))


@pytest.mark.parametrize(
    ("name", "expected", "words"),
    [
        ("healthy", [], ()),
        ("collapsed", ["collapse"], ("entropy fell from", "and the reward from")),
        ("hacked", ["reward hacking"], ("accuracy fell from 50.0 % (version 0)", "57 tokens", "4-grams")),
        ("no-signal", ["no signal"], ("% of groups gave no signal: easier data or a larger group.",)),
        ("instant-collapse", ["collapse"], ("from 42.0 % (version 0) to 0.0 % (version 40)",)),
        ("length", ["reward hacking"], ("follows the length",)),
        ("constant", ["no signal"], ("got the reward 0.5",)),
        ("thinks-longer", [], ()),
    ],
)  # fmt: skip
def test_each_made_up_run_raises_its_alarm_and_no_other(
    tmp_path: Path, name: str, expected: list[str], words: tuple[str, ...]
) -> None:
    facts = read_facts(write_made_up_run(tmp_path, name).root)
    unreadable: list[str] = []
    _, repetition = read_completions(facts, unreadable)
    found = find_alarms(facts.metrics, facts.held_out, repetition)
    assert [a.kind for a in found if a.is_alarm] == expected
    assert unreadable == []
    if not expected:
        assert found == []
        return
    assert found[0].is_alarm
    assert found[0].since < STEPS
    for part in words:
        assert part in found[0].text


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["healthy", "thinks-longer"])
def test_noise_raises_no_alarm(tmp_path: Path, name: str, seed: int) -> None:
    facts = read_facts(write_made_up_run(tmp_path, name, seed=seed).root)
    assert find_alarms(facts.metrics, facts.held_out) == []


def test_a_change_compares_fifths_by_hand() -> None:
    # 15 values: windows of 3. Means 2 and 8, variances 1 and 4: error sqrt((1 + 4) / 3).
    change = change_of([1, 2, 3, *[5] * 9, 6, 8, 10])
    assert change is not None
    assert (change.before, change.after) == (2, 8)
    assert change.error == pytest.approx(math.sqrt(5 / 3))
    assert change.rose
    assert not change.fell
    assert change_of([1, 2, 3, 4, 5]) is None


def test_one_partial_score_makes_all_means_of_a_run_rewards(tmp_path: Path) -> None:
    for name, word in (("healthy", "accuracy"), ("length", "mean reward")):
        facts = read_facts(write_made_up_run(tmp_path, name).root)
        assert {h.score.name for h in facts.held_out} == {word}
        assert facts.has_partial_rewards is (word == "mean reward")


def test_a_held_out_gain_within_the_noise_is_none() -> None:
    assert held_out_gain(held_out(0, 50), held_out(1, 55)) == 0
    assert held_out_gain(held_out(0, 50), held_out(1, 80)) == pytest.approx(0.3)
    assert held_out_gain(held_out(0, 50), held_out(1, 20)) == pytest.approx(-0.3)


def test_no_signal_names_the_remedy_that_fits() -> None:
    for correct, remedy in ((0.02, "easier data"), (0.5, "larger group"), (0.97, "harder data")):
        metrics = steps(
            8, groups__zero_std_sampled_frac=lambda k: 0.86, reward__right_frac=lambda k, c=correct: c
        )
        (alarm,) = find_alarms(metrics)
        assert alarm.text.startswith("86 % of groups gave no signal")
        assert remedy in alarm.text
    assert kinds(steps(8, groups__zero_std_sampled_frac=lambda k: 0.79)) == []


def test_since_is_the_first_step_of_the_last_stretch() -> None:
    metrics = steps(100, groups__zero_std_sampled_frac=lambda k: 1.0 if k < 20 or k > 60 else 0.1)
    (alarm,) = find_alarms(metrics)
    assert 70 <= alarm.since <= 85  # the mean over the last fifth passes 80 %


def test_entropy_may_fall_while_accuracy_rises() -> None:
    def falling(k: int) -> float:
        return math.exp(-k / 6)

    up = [held_out(0, 30), held_out(30, 70)]
    assert kinds(steps(30, policy__entropy=falling, reward__mean=lambda k: k / 40), up) == []
    assert kinds(steps(30, policy__entropy=falling, reward__right_frac=lambda k: 0.1)) == ["collapse"]


def test_a_random_policy_is_a_collapse_too() -> None:
    metrics = steps(
        30, policy__entropy=lambda k: k / 5, reward__mean=lambda k: 0.6 - k / 60 + 0.001 * (k % 2)
    )
    (alarm,) = find_alarms(metrics)
    assert (alarm.kind, "became random" in alarm.text) == ("collapse", True)


def test_a_policy_that_lost_its_accuracy_and_its_reward_has_collapsed() -> None:
    """Its entropy fell to a third and came back."""
    metrics = steps(
        30,
        policy__entropy=lambda k: 1.0 if k < 7 else 0.34 if k < 20 else 0.7,
        reward__mean=lambda k: max(0.0, 0.2 - k / 60) + 0.001 * (k % 2),
        groups__zero_std_sampled_frac=lambda k: 1.0,
    )
    (alarm,) = find_alarms(metrics, [held_out(0, 47), held_out(30, 0)])
    assert alarm.kind == "collapse"
    assert "accuracy fell from 47.0 % (version 0) to 0.0 % (version 30), and the training" in alarm.text
    assert "collapse" not in kinds(metrics, [held_out(0, 47), held_out(30, 20)]), (
        "more than a quarter is left"
    )
    assert "collapse" not in kinds(metrics, [held_out(0, 3), held_out(30, 0)]), "within the noise"
    assert kinds(metrics) == ["collapse"], "without held-out scores the reward decides"


def after_one_step(last: float, count: int, first: float = 0.417) -> list[dict[str, Any]]:
    """Rewards of 0 or 1 with the mean `first` in step 1, and `last` in all later ones."""

    def mean(k: int) -> float:
        return first if k == 1 else last

    return steps(
        count,
        reward__mean=mean,
        reward__right_frac=mean,
        reward__std=lambda k: math.sqrt(mean(k) * (1 - mean(k))),
    )


@pytest.mark.parametrize("count", [4, 8, 30])
def test_an_instant_collapse_is_no_reward_hacking(count: int) -> None:
    assert kinds(after_one_step(0.0, count), [held_out(0, 42), held_out(count, 0)]) == ["collapse"]
    assert kinds(after_one_step(0.0, count)) == ["collapse"], "without held-out scores too"


def test_a_fall_of_half_the_score_at_once_is_a_fall_and_no_hacking() -> None:
    metrics = after_one_step(0.2, 10)
    assert kinds(metrics, [held_out(0, 42), held_out(10, 20)]) == ["reward fell"]


def test_one_lucky_step_is_no_collapse() -> None:
    # Eight prompts of one completion: 0.25 in the first step, 0.05 later. 0.2 is 1.8 errors of 0.11.
    assert kinds(after_one_step(0.05, 10, first=0.25)) == []
    assert kinds(after_one_step(0.2, 10, first=0.6)) == [], "a third is left"


def test_a_reward_that_never_was_above_zero_is_not_hacked() -> None:
    metrics = steps(20, reward__mean=lambda k: 0.0, reward__right_frac=lambda k: 0.0)
    assert kinds(metrics, [held_out(0, 42), held_out(20, 0)]) == ["collapse"]


def test_hacking_needs_a_reward_that_stays_up() -> None:
    def noisy(level: float) -> list[dict[str, Any]]:
        return steps(20, reward__mean=lambda k: level + 0.05 * (-1) ** k)

    scores = [held_out(0, 60), held_out(10, 20), held_out(20, 20)]
    assert kinds(noisy(0.5), scores) == ["reward hacking"]
    assert kinds(noisy(-0.5), scores) == ["reward hacking"], "negative rewards too"


def test_entropy_may_fall_while_a_partial_reward_rises() -> None:
    metrics = steps(
        30,
        policy__entropy=lambda k: math.exp(-k / 6),
        reward__mean=lambda k: k / 40,
        reward__right_frac=lambda k: 0.0,
    )
    assert kinds(metrics) == []


def grown(corr: float, **series: Any) -> list[str]:
    return kinds(
        steps(
            30,
            completion__tokens_mean=lambda k: 20.0 + k,
            completion__truncated_frac=lambda k: 0.75,
            reward__tokens_corr=lambda k: corr,
            reward__mean=lambda k: 0.2 + k / 50,
            **series,
        )
    )


def test_a_reward_of_length_is_hacked_and_truncation_is_no_fault_of_the_limit() -> None:
    assert grown(0.95) == ["reward hacking"]
    assert grown(0.3) == ["drift", "truncated"]
    assert grown(0.95, reward__right_frac=lambda k: k / 40) == ["truncated"], "more right answers"
    partial = [
        replace(held_out(v, c), score=mean_score([[c / 10]] * 9 + [[c / 9]])) for v, c in ((0, 5), (30, 22))
    ]
    metrics = steps(30, completion__tokens_mean=lambda k: 20.0 + k, reward__tokens_corr=lambda k: 0.95)
    assert kinds(metrics, partial) == ["reward hacking"], "a held-out score of the same reward is no witness"


def test_longer_is_not_advised_where_longer_scores_more() -> None:
    cut: dict[str, Any] = {"completion__truncated_frac": lambda k: 0.9}
    (plain,) = find_alarms(steps(30, **cut))
    (longer,) = find_alarms(steps(30, **cut, reward__tokens_corr=lambda k: 0.7))
    assert plain.text != longer.text
    assert "raise rollout.max_completion_tokens" not in longer.text.split("before you")[0]


@pytest.mark.parametrize(("reward", "right"), [(0.0, 0.0), (0.5, 0.0), (1.0, 1.0)])
def test_a_constant_reward_is_told_from_hard_data(reward: float, right: float) -> None:
    def made(count: int, **series: Any) -> list[dict[str, Any]]:
        same = {
            "reward__mean": lambda k: reward,
            "reward__std": lambda k: 0.0,
            "reward__right_frac": lambda k: right,
            "groups__zero_std_sampled_frac": lambda k: 1.0,
        }
        return steps(count, **same | series)

    (alarm,) = find_alarms(made(8))
    assert alarm.kind == "no signal"
    assert alarm.text == constant_reward(made(8))
    assert "easier data or a larger group" not in alarm.text
    assert constant_reward(made(2)) == ""
    assert constant_reward(made(8, reward__mean=lambda k: reward + k % 2)) == ""
    assert constant_reward(made(8, reward__std=lambda k: 0.1)) == ""


def test_half_of_the_completions_cut_off_needs_no_three_steps() -> None:
    assert kinds(steps(2, completion__truncated_frac=lambda k: 0.75)) == ["truncated"]
    assert kinds(steps(2, completion__truncated_frac=lambda k: 0.3)) == []


def test_what_a_collapse_or_hacking_explains_is_not_advised_against() -> None:
    symptoms: dict[str, Any] = {
        "completion__truncated_frac": lambda k: 0.9,
        "groups__zero_std_sampled_frac": lambda k: 1.0,
    }
    assert set(kinds(steps(30, **symptoms))) == {"truncated", "no signal"}
    falls = {"policy__entropy": lambda k: k / 5, "reward__mean": lambda k: 0.6 - k / 60 + 0.001 * (k % 2)}
    assert kinds(steps(30, **symptoms, **falls)) == ["collapse"]
    rises = steps(30, **symptoms, reward__mean=lambda k: k / 40)
    assert kinds(rises, [held_out(0, 60), held_out(30, 20)]) == ["reward hacking", "no signal"]


def test_both_falling_is_not_hacking() -> None:
    falls = steps(30, reward__mean=lambda k: 0.6 - k / 60 + 0.001 * (k % 2))
    assert kinds(falls, [held_out(0, 60), held_out(30, 20)]) == ["reward fell"]


def test_longer_completions_with_more_accuracy_are_fine() -> None:
    longer = steps(30, completion__tokens_mean=lambda k: 20.0 + k)
    assert kinds(longer, [held_out(0, 30), held_out(30, 70)]) == []
    assert kinds(longer, [held_out(0, 30), held_out(30, 32)]) == ["drift"]


def test_a_change_of_a_few_tokens_is_no_drift() -> None:
    def changed(first: float, last: float) -> list[str]:
        return kinds(steps(30, completion__tokens_mean=lambda k: first if k < 15 else last))

    assert changed(2.0, 3.0) == []
    assert changed(6.0, 1.5) == []
    assert changed(6.0, 11.0) == ["drift"]


def test_repetition_truncation_mismatch_and_skipped_steps() -> None:
    fine = steps(30)
    assert kinds(fine, (), {k: k / 60 for k in range(1, 31)}) == ["drift"]
    assert kinds(steps(30, completion__truncated_frac=lambda k: 0.3)) == ["truncated"]
    assert kinds(steps(30, mismatch__logprob_diff_mean=lambda k: 1e-5 * 1.5**k)) == ["mismatch"]
    assert kinds(steps(30, mismatch__ess_frac=lambda k: 0.4)) == ["mismatch"]
    assert kinds(steps(30, anomaly__skipped=lambda k: float(k == 7))) == ["skipped"]


def test_episodes_that_end_at_a_limit_are_no_cut_completions() -> None:
    share = {"completion__truncated_frac": lambda k: 0.3}
    (one_turn,) = find_alarms(steps(30, **share))
    (episodes,) = find_alarms(steps(30, **share, turns__mean=lambda k: 3.0))
    assert one_turn.text == "30 % of completions are cut off: raise rollout.max_completion_tokens."
    assert episodes.text.startswith("30 % of episodes ended at a limit")
    assert "env.max_turns" in episodes.text


def test_strange_values_raise_nothing() -> None:
    odd: list[Any] = [None, "text", True, 10**400, float("inf"), [1], {}]
    metrics = [
        {"step": k + 1, **dict.fromkeys(["reward/mean", *FINE], value)} for k, value in enumerate(odd * 3)
    ]
    assert find_alarms(metrics) == []
    assert find_alarms([]) == []
    assert find_alarms([{"step": 1}]) == []
