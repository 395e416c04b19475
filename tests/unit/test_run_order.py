"""The order of the steps of a run: sampling, evaluation, skipped steps, time limit, resume."""

from __future__ import annotations

import io
import json
import logging
import math
from collections.abc import Sequence
from pathlib import Path

import pytest
from rich.console import Console

from skylite.config.train import TrainConfig
from skylite.data.prompt_order import prompts_for_step
from skylite.environments.source import request_seed
from skylite.errors import RunFailed
from skylite.rollout.resume import remove_after
from skylite.rollout.session import TimeLimit, read_events
from skylite.rollout.step_metrics import busy_s
from skylite.run.metrics_file import held_out_scores, read_metrics, scores_are_binary
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir
from skylite.types import Prompt, Score
from skylite.ui.dashboard import Screen
from skylite.ui.logs import configure_logging, run_log
from tests.unit.simulated_run import (
    PROMPTS,
    Broken,
    run_of,
    sampled_from,
    times,
)

SKIPPED = {2: {"skipped": "loss/policy is nan"}}
LESS_MEMORY = "step 2 ran out of memory (CUDA out of memory); it was computed again with half"


def test_on_policy_steps_sample_from_the_version_before_without_overlap(tmp_path: Path) -> None:
    run, engine, _ = run_of(tmp_path, 0, 4)
    assert sampled_from(run) == {k: k - 1 for k in range(1, 5)}
    started, verified = times(run, "sampling_started", "step"), times(run, "adapter_verified", "version")
    assert all(started[k] > verified[k - 1] for k in started)
    unloaded = times(run, "adapter_unloaded", "version")
    assert unloaded.keys() == {0, 1, 2, 3}
    assert all(unloaded[k] >= verified[k + 1] for k in unloaded), "the canary compares two versions"
    metrics = read_metrics(run.metrics_path)
    assert {m["staleness/max"] for m in metrics} == {0}
    assert max(m["time/overlap_s"] for m in metrics) == 0.0
    assert engine.names == ["policy-v000004"]


def test_after_the_last_step_the_newest_version_stays_loaded(tmp_path: Path) -> None:
    run, engine, _ = run_of(tmp_path, 0, 4, first_step=5)
    assert engine.names == ["policy-v000004"]
    assert read_metrics(run.metrics_path) == []


@pytest.mark.parametrize("staleness", [0, 1])
def test_held_out_problems_are_evaluated_every_eval_every_steps(tmp_path: Path, staleness: int) -> None:
    run, engine, _ = run_of(tmp_path, staleness, 5, eval_every=2)
    assert sorted(p.name for p in run.evals.glob("*.json")) == [
        "after-v000005.json",
        "before-v000000.json",
        "step-v000002.json",
        "step-v000004.json",
    ]
    assert held_out_scores(run, TrainConfig.model_validate({"eval": {"limit": 2}}).eval) == dict.fromkeys(
        (0, 2, 4, 5), 1.0
    )
    assert len(engine.requests) == 5 * 2 + 4 * 2, "two prompts a step, two problems an evaluation"
    assert sampled_from(run) == {k: max(0, k - 1 - staleness) for k in range(1, 6)}


class FromNow:
    """Scores 1, from the `first` call on 0.25."""

    def __init__(self, first: int) -> None:
        self.first, self.calls = first, 0

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        self.calls += 1
        return [Score(0.25 if self.calls >= self.first else 1.0) for _ in items]


def test_a_score_is_an_accuracy_until_one_is_partial(tmp_path: Path) -> None:
    run, _, logged = run_of(tmp_path / "right", 0, 2, eval_every=1)
    assert "evaluation (before): greedy accuracy 100.0 % " in logged
    assert scores_are_binary(run)
    # Two problems before, two prompts in step 1: the first partial score is in the evaluation after it.
    run, _, logged = run_of(tmp_path / "partial", 0, 3, eval_every=1, scorer=FromNow(5))
    assert "evaluation (before): greedy accuracy 100.0 % " in logged
    assert "evaluation (step): step 1: greedy mean reward 0.25 " in logged
    assert not scores_are_binary(run)
    assert [m["reward/partial_frac"] for m in read_metrics(run.metrics_path)] == [0, 1, 1]


def test_held_out_scores_are_in_the_metrics_of_their_step(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 0, 4, eval_every=2)
    found = [m.get("eval/score") for m in read_metrics(run.metrics_path)]
    assert found == [None, 1.0, None, 1.0]


@pytest.mark.parametrize(("staleness", "first_step"), [(0, 3), (1, 3), (1, 4)])
def test_an_interrupted_evaluation_is_repeated_before_sampling(
    tmp_path: Path, staleness: int, first_step: int
) -> None:
    """When sampling ahead, the next step may be trained and have a checkpoint by then."""
    evaluation = [("policy-v000002", index, request_seed(0, -1, index)) for index in range(2)]
    requests, scores, logged = {}, {}, ""
    for name in ("original", "died"):
        run, _, _ = run_of(tmp_path / name, staleness, 4, eval_every=2)
        if name == "died":
            (run.evals / "step-v000002.json").unlink()  # the completions are written before it
        remove_after(run, run.default_adapters, first_step - 1, reuse_rollouts=False)
        _, engine, logged = run_of(tmp_path / name, staleness, 6, first_step=first_step, eval_every=2)
        requests[name], scores[name] = (
            engine.requests,
            held_out_scores(run, TrainConfig.model_validate({"eval": {"limit": 2}}).eval),
        )
    assert not set(evaluation) & set(requests["original"])
    assert requests["died"] == evaluation + requests["original"]
    assert scores["died"] == scores["original"]
    assert "evaluation (step): step 2: greedy accuracy" in logged


def test_a_resumed_run_verifies_its_adapter_before_sampling(tmp_path: Path) -> None:
    for first_step in (1, 3):
        run, _, _ = run_of(tmp_path / str(first_step), 0, 3, first_step=first_step, resumed=True)
        assert (
            times(run, "sampling_started", "step")[first_step]
            > times(run, "adapter_verified", "version")[first_step - 1]
        )


def test_a_step_skipped_by_the_trainer_is_logged_and_recorded(tmp_path: Path) -> None:
    run, _, logged = run_of(tmp_path, 0, 3, facts=SKIPPED)
    assert "step 2 is skipped, policy-v000002 equals the adapter before it: loss/policy is nan" in logged
    assert [m.get("anomaly/reason") for m in read_metrics(run.metrics_path)] == [
        None,
        "loss/policy is nan",
        None,
    ]


@pytest.mark.parametrize("level", [logging.WARNING, logging.INFO])
def test_a_warning_of_the_trainer_reaches_a_quiet_terminal_the_live_panel_and_the_log(
    tmp_path: Path, level: int
) -> None:
    """A step that ran out of memory is computed again by the trainer, and only the parent has the screen."""
    configure_logging(level)
    is_live, out = level == logging.INFO, io.StringIO()
    console = Console(file=out, width=200, force_terminal=is_live, force_interactive=is_live)
    with run_log(tmp_path / "run.log"), Screen(3, console):
        run_of(tmp_path / "run", 0, 3, facts={2: {"warnings": [LESS_MEMORY]}})
    lines = [line for line in out.getvalue().splitlines() if "ran out of memory" in line]
    assert len(lines) == 1
    assert lines[0].endswith(f"warning: {LESS_MEMORY}")
    assert is_live or out.getvalue() == f"{lines[0]}\n", "the quiet terminal shows nothing else"
    assert (tmp_path / "run.log").read_text().count(f" WARNING skylite.rollout.loop: {LESS_MEMORY}\n") == 1


def test_a_nan_reward_reaches_the_trainer_and_is_null_in_the_metrics(tmp_path: Path) -> None:
    bad = prompts_for_step(PROMPTS, 2, 2, 0)[1].id
    run, _, logged = run_of(tmp_path, 0, 3, facts=SKIPPED, scorer=Broken(bad))
    rewards = [t.reward for g in read_rollouts(run.rollout_path(2)) for t in g.trajectories]
    assert list(map(math.isnan, rewards)) == [False, False, True, True]
    assert [
        json.loads(line, parse_constant=pytest.fail)["reward/mean"]
        for line in run.metrics_path.read_text().splitlines()
    ][1] is None
    assert "step 2/3  reward nan" in logged


class Same:
    """Gives every completion the same score."""

    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(0.5)] * len(items)


def test_a_run_whose_groups_have_equal_rewards_says_that_it_learns_nothing(tmp_path: Path) -> None:
    run, _, logged = run_of(tmp_path, 0, 4, scorer=Same())
    assert logged.count("the policy learns nothing") == 1
    status = json.loads(run.status_path.read_text())
    assert "steps all rewards within a group were equal, 0.5 on average" in status["warning"]


def test_a_nan_held_out_score_is_refused_and_names_the_problem(tmp_path: Path) -> None:
    with pytest.raises(RunFailed, match="returned nan for prompt 1 "):
        run_of(tmp_path, 0, 3, eval_every=1, scorer=Broken("1"))
    assert list(RunDir(tmp_path).evals.glob("*")) == []


def test_a_time_limit_ends_the_run_after_a_complete_step(tmp_path: Path) -> None:
    limit = TimeLimit(hours=0.35 / 3600)
    run, _, logged = run_of(tmp_path, 0, 40, limit=limit)
    steps = [m["step"] for m in read_metrics(run.metrics_path)]
    assert 1 <= len(steps) < 10
    assert "--max-hours 9.72222e-05: stopping, because the next step" in logged
    assert not run.trainer_step_path(steps[-1] + 1).exists()


def test_overlapping_seconds_count_once() -> None:
    assert busy_s((0.0, 10.0), [(1.0, 3.0), (2.0, 4.0), (6.0, float("inf")), (-5.0, 0.5)]) == pytest.approx(
        0.5 + 3.0 + 4.0
    )
    assert busy_s((0.0, 1.0), [(2.0, 3.0)]) == 0.0


def test_an_event_cut_off_by_a_kill_is_ignored(tmp_path: Path) -> None:
    run, _, _ = run_of(tmp_path, 0, 1)
    original = read_events(run.events_path)
    with run.events_path.open("ab") as stream:
        stream.write(json.dumps({"event": "trainer_step_seen"}).encode()[:9])
    assert read_events(run.events_path) == original
