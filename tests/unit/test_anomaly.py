"""A step with bad numbers is rolled back, reported with its reason, and its inputs are saved."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.config.rollout import GREEDY
from skylite.config.train import AnomalyConfig, TrainConfig
from skylite.errors import ConfigError, TrainingDiverged
from skylite.model.process_group import Dist
from skylite.run.rollout_file import examples_of
from skylite.run.run_dir import RunDir
from skylite.trainer.anomaly import (
    FINITE_METRICS,
    consecutive_skips,
    metric_anomaly,
    parameter_anomaly,
    reject_step,
    reward_collapse,
    rollout_anomaly,
    save_rejected_step,
    snapshots_before_update,
    take_snapshot,
    train_or_roll_back,
)
from skylite.trainer.optimizer import FlatAdamW
from tests.cases import optimizer_of, policy_of, train_rows
from tests.rows import Row, groups_of, random_episodes, random_samples, write_samples
from tests.settings import load_config
from tests.small_run import settings


def numbers_of(optimizer: FlatAdamW) -> list[torch.Tensor]:
    """Every tensor that an update changes."""
    state = take_snapshot(optimizer)
    return [*state.params.values(), *(v for moments in state.moments.values() for v in moments.values())]


def with_nan(samples: list[Row]) -> list[Row]:
    return [
        replace(samples[0], sampling_logprobs=[float("nan")] * len(samples[0].sampling_logprobs)),
        *samples[1:],
    ]


def anomaly_finder(config: TrainConfig, optimizer: FlatAdamW) -> Callable[[Any], str]:
    return lambda metrics: metric_anomaly(metrics, config.anomaly) or parameter_anomaly([optimizer])


@pytest.mark.parametrize(
    ("sections", "samples", "words"),
    [
        ({}, with_nan(random_samples(1)), r"^the gradient of the policy is not finite \(norm nan\)$"),
        ({}, with_nan(random_episodes(1)), r"^the gradient of the policy is not finite \(norm nan\)$"),
        # The first update of the step is good and applied; the second is bad.
        (
            {"algorithm": {"updates_per_step": 2}},
            with_nan(random_samples(1)[::-1])[::-1],
            "gradient of the policy",
        ),
        ({"optim": {"lr": 3e38}}, random_samples(1), "matrices not finite"),
        (
            {"anomaly": {"max_mismatch_kl": 1e-3}},
            random_samples(1),
            "mismatch/kl is .*, over anomaly.max_mismatch_kl=0.001",
        ),
        (
            {"anomaly": {"max_kl": 1e-9}, "algorithm": {"kl_coef": 1e-9}},
            random_samples(1),
            "policy/kl_ref is .*, over anomaly.max_kl=1e-09",
        ),
    ],
)
def test_a_bad_step_is_rolled_back_completely(
    sections: Any, samples: list[Row], words: str, tiny_llama: Path, dist: Dist
) -> None:
    config = settings(**sections)
    policy = policy_of(tiny_llama, config, dist)
    optimizer = optimizer_of(policy, settings())
    train_rows(policy, optimizer, random_samples(0), 1, settings(), dist)
    optimizer.adamw.param_groups[0]["peak_lr"] = config.optim.lr
    before = numbers_of(optimizer)
    assert len(before) == 4 * len(optimizer.params)

    def learn() -> dict[str, float]:
        return train_rows(policy, optimizer, samples, 2, config, dist)

    _, anomaly, _ = train_or_roll_back([optimizer], dist, learn, anomaly_finder(config, optimizer), dict)
    assert re.search(words, anomaly), anomaly
    assert all(torch.equal(a, b) for a, b in zip(before, numbers_of(optimizer), strict=True))

    # The next step is the same as without the bad step.
    _, anomaly, _ = train_or_roll_back(
        [optimizer],
        dist,
        lambda: train_rows(policy, optimizer, random_samples(2), 3, settings(), dist),
        lambda _: "",
        dict,
    )
    assert anomaly == ""
    assert not all(torch.equal(a, b) for a, b in zip(before, numbers_of(optimizer), strict=True))


def test_the_rollback_copy_is_made_once_at_the_first_update(tiny_llama: Path, dist: Dist) -> None:
    policy = policy_of(tiny_llama, settings(), dist)
    optimizer = optimizer_of(policy, settings())
    start = numbers_of(optimizer)
    with snapshots_before_update([optimizer]) as before:
        assert before == {}
        train_rows(policy, optimizer, random_samples(0), 1, settings(), dist)
        first = before["policy"]
        train_rows(policy, optimizer, random_samples(1), 2, settings(), dist)
        assert before["policy"] is first
    assert all(torch.equal(a, b) for a, b in zip(start, first.params.values(), strict=True))
    assert first.moments == {}
    train_rows(policy, optimizer, random_samples(2), 3, settings(), dist)
    assert before["policy"] is first


def test_a_policy_with_a_nan_canary_is_rolled_back_before_publishing(tiny_llama: Path, dist: Dist) -> None:
    policy = policy_of(tiny_llama, settings(), dist)
    optimizer = optimizer_of(policy, settings())
    before = numbers_of(optimizer)

    def publish() -> dict[str, float]:
        raise TrainingDiverged("the logprobs of policy-v000001 on the canary are not finite")

    def learn() -> dict[str, float]:
        return train_rows(policy, optimizer, random_samples(0), 1, settings(), dist)

    assert (
        train_or_roll_back([optimizer], dist, learn, lambda _: "", publish)[1]
        == "the logprobs of policy-v000001 on the canary are not finite"
    )
    assert all(torch.equal(a, b) for a, b in zip(before, numbers_of(optimizer), strict=True))


def test_a_step_that_ran_out_of_memory_changes_nothing(tiny_llama: Path, dist: Dist) -> None:
    """It is computed again with smaller micro-batches."""
    policy = policy_of(tiny_llama, settings(), dist)
    optimizer = optimizer_of(policy, settings())
    before = numbers_of(optimizer)

    def learn() -> dict[str, float]:
        train_rows(policy, optimizer, random_samples(0), 1, settings(), dist)
        raise MemoryError

    with pytest.raises(MemoryError):
        train_or_roll_back([optimizer], dist, learn, lambda _: "", dict)
    assert all(torch.equal(a, b) for a, b in zip(before, numbers_of(optimizer), strict=True))


def test_the_first_matrix_that_is_not_finite_is_named(tiny_llama: Path, dist: Dist) -> None:
    optimizer = optimizer_of(policy_of(tiny_llama, settings(), dist), settings())
    names = list(optimizer.params)
    for name in names[1:3]:
        optimizer.params[name].data[0, 0] = float("inf")
    found = parameter_anomaly([optimizer])
    assert found == f"the update left 2 of the policy's matrices not finite, first {names[1]}"


def test_an_input_that_is_not_finite_is_named() -> None:
    samples = random_samples(0)
    assert rollout_anomaly(examples_of(groups_of(samples))) == ""
    samples[5] = replace(samples[5], completion_token_ids=[1, 2], sampling_logprobs=[-1.0, float("-inf")])
    expected = "the engine's logprob of token 1 in turn 0 of trajectory 1 of group 1 is -inf"
    assert rollout_anomaly(examples_of(groups_of(samples))) == expected
    rows = random_episodes(0)
    rows[1].sampling_logprobs[len(rows[1].all_calls[0][1])] = float("nan")
    expected = "the engine's logprob of token 0 in turn 1 of trajectory 1 of group 0 is nan"
    assert rollout_anomaly(examples_of(groups_of(rows))) == expected
    rows[1] = replace(rows[0], components={GREEDY: float("nan")})
    expected = f"the reward of the greedy completion of prompt {groups_of(rows)[0].prompt.id} is nan"
    assert rollout_anomaly(examples_of(groups_of(rows))) == expected
    for reward in ("nan", "inf", "-inf", "1e+39"):
        samples[0] = replace(samples[0], prompt_id="t/train/7")
        samples[2] = replace(samples[2], reward=float(reward))
        expected = f"the reward of trajectory 2 of group 0 (prompt t/train/7) is {reward}"
        assert rollout_anomaly(examples_of(groups_of(samples))) == expected


def test_reward_collapse_needs_every_step_of_the_window_to_be_too_low(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rollouts.mkdir()
    for step, reward in enumerate([0.6, 0.1, 0.2, 0.1], 1):
        write_samples(run.rollout_path(step), [replace(s, reward=reward) for s in random_samples(0)])
    rules = AnomalyConfig(min_reward=0.5, min_reward_steps=3)
    assert [bool(reward_collapse(run, step, rules)) for step in (1, 2, 3, 4)] == [False, False, False, True]
    assert "in steps 2 to 4 (last 0.1)" in reward_collapse(run, 4, rules)
    assert "in steps 2 to 3 (last 0.2)" in reward_collapse(run, 3, replace_steps(rules, 2))
    assert reward_collapse(run, 4, AnomalyConfig()) == ""
    for none in (float("nan"), float("-inf")):
        write_samples(run.rollout_path(3), [replace(s, reward=none) for s in random_samples(0)])
        assert reward_collapse(run, 4, rules) == "", "a step without numbers is no low reward"


def replace_steps(rules: AnomalyConfig, count: int) -> AnomalyConfig:
    return rules.model_copy(update={"min_reward_steps": count})


def test_the_inputs_of_every_bad_step_are_saved(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rollouts.mkdir()
    write_samples(run.rollout_path(7), random_samples(0))
    for name in ("step-000007", "step-000007-2"):
        folder = save_rejected_step(
            run, 7, "loss/policy is nan", {"loss/policy": float("nan"), "optim/lr": 1.0}, AnomalyConfig()
        )
        assert folder == run.rejected_steps / name
        assert (folder / "rollouts.parquet").read_bytes() == run.rollout_path(7).read_bytes()
        reason = json.loads((folder / "reason.json").read_text(), parse_constant=pytest.fail)
        assert (reason["reason"], reason["metrics"]) == (
            "loss/policy is nan",
            {"loss/policy": "nan", "optim/lr": 1.0},
        )


@pytest.mark.parametrize(
    ("action", "skips", "stops"),
    [("stop", [], True), ("skip", [], False), ("skip", [3], False), ("skip", [2, 3], True)],
)
def test_a_bad_step_is_skipped_or_ends_the_run_with_a_checkpoint(
    tmp_path: Path, dist: Dist, action: str, skips: list[int], stops: bool
) -> None:
    run, saved = RunDir(tmp_path), []
    run.rollouts.mkdir()
    run.trainer_steps.mkdir()
    write_samples(run.rollout_path(4), random_samples(0))
    for number in range(1, 4):
        run.trainer_step_path(number).write_text(json.dumps({"skipped": "why"} if number in skips else {}))
    config = load_config(None, {"anomaly.action": action, "anomaly.max_skips": 2})
    metrics = {"policy/entropy": 0.5, "loss/policy": float("nan")}
    before = r", and the 2 steps before it were skipped" if skips else ""
    end = pytest.raises(TrainingDiverged, match=rf"Step 4 went bad: bad{before}\. The update was not applied")
    with end if stops else nullcontext():
        kept = reject_step(run, config, dist, 4, "bad", metrics, lambda: saved.append(True))
        assert kept == {
            "policy/entropy": 0.5, "mismatch/logprob_diff_mean": pytest.approx(float("nan"), nan_ok=True)
        }  # fmt: skip
    assert saved == ([True] if stops else [])
    assert (run.rejected_steps / "step-000004" / "reason.json").exists()


def test_a_kl_limit_without_a_measured_kl_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"anomaly.max_kl=0.1 limits .* algorithm.kl_coef=0 does not measure"
    ):
        load_config(None, {"anomaly.max_kl": 0.1})


@pytest.mark.parametrize(
    ("skipped", "step", "count"), [([], 5, 0), ([4], 5, 1), ([2, 3, 4], 5, 3), ([3], 5, 0)]
)
def test_skipped_steps_in_a_row_are_counted_back_from_a_step(
    tmp_path: Path, skipped: list[int], step: int, count: int
) -> None:
    run = RunDir(tmp_path)
    run.trainer_steps.mkdir()
    for number in range(1, 5):
        run.trainer_step_path(number).write_text(json.dumps({"skipped": "why"} if number in skipped else {}))
    assert consecutive_skips(run, step) == count


@pytest.mark.parametrize("name", FINITE_METRICS)
def test_every_loss_norm_and_kl_must_be_finite(name: str) -> None:
    assert metric_anomaly({name: float("inf")}, AnomalyConfig()) == f"{name} is inf"
    assert metric_anomaly({name: 1e30}, AnomalyConfig(max_mismatch_kl=None, max_kl=None)) == ""


def test_a_kl_of_exactly_the_limit_is_no_anomaly() -> None:
    rules = AnomalyConfig(max_mismatch_kl=0.5, max_kl=0.25)
    assert metric_anomaly({"mismatch/kl": 0.5, "policy/kl_ref": 0.25}, rules) == ""
    assert (
        metric_anomaly({"mismatch/kl": 0.51}, rules)
        == "mismatch/kl is 0.51, over anomaly.max_mismatch_kl=0.5"
    )
    assert metric_anomaly({"policy/kl_ref": 0.26}, rules) == "policy/kl_ref is 0.26, over anomaly.max_kl=0.25"


def test_a_mean_reward_of_exactly_the_limit_is_no_collapse(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    run.rollouts.mkdir()
    for step in (1, 2):
        write_samples(run.rollout_path(step), [replace(s, reward=0.5) for s in random_samples(0)])
    assert reward_collapse(run, 2, AnomalyConfig(min_reward=0.5, min_reward_steps=2)) == ""
    assert reward_collapse(run, 2, AnomalyConfig(min_reward=0.51, min_reward_steps=2))
    run.rollout_path(1).unlink()
    assert reward_collapse(run, 2, AnomalyConfig(min_reward=0.51, min_reward_steps=2)) == ""
