"""A run warns of rollouts that part from the trainer, and ends in the next step that shows it."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from skylite.errors import SyncFailed
from skylite.run.metrics_file import read_metrics
from skylite.run.status import read_status
from skylite.types import Prompt, Score
from tests.unit.simulated_run import run_of
from tests.unit.test_judge_rollouts import row

PARTED = {"rollout_gaps": {"bins": [row(0, 1e-7), row(64, 0.05)]}}
FINE = {"rollout_gaps": {"bins": [row(0, 1e-7), row(64, 1e-7)]}}


def facts(*parted: int) -> dict[int, dict[str, Any]]:
    return {step: PARTED if step in parted else FINE for step in range(1, 5)}


def test_two_steps_on_end_stop_the_run_after_a_warning(tmp_path: Path) -> None:
    with pytest.raises(SyncFailed, match="from a context of 64 tokens on"):
        run_of(tmp_path, 0, 4, facts=facts(2, 3))
    steps = read_metrics(tmp_path / "metrics.jsonl")
    assert [m["step"] for m in steps] == [1, 2, 3], "the step that stops is recorded, too"
    assert [m["mismatch/judged_gap"] > 0.01 for m in steps] == [False, True, True]


def test_a_single_step_warns_and_trains_on(tmp_path: Path) -> None:
    run, _, log = run_of(tmp_path, 0, 4, facts=facts(2, 4))
    assert len(read_metrics(run.metrics_path)) == 4
    assert log.count("disagree about the sampled tokens") == 2


def test_rollouts_that_cannot_be_judged_say_so_once(tmp_path: Path) -> None:
    reason = {"rollout_gaps": {"not_judged": "the moon is full"}}
    run, _, log = run_of(tmp_path, 0, 3, facts=dict.fromkeys(range(1, 4), reason))
    assert log.count("the moon is full") == 1
    assert "mismatch/judged_gap" not in read_metrics(run.metrics_path)[0]


def test_stored_rollouts_are_not_judged_and_the_log_says_so(tmp_path: Path) -> None:
    """Step 3 was sampled, and perhaps by another engine, before the run was resumed."""
    run, _, _ = run_of(tmp_path, 0, 3)
    run.trainer_step_path(3).unlink()
    run, _, log = run_of(tmp_path, 0, 4, first_step=3, facts=facts(3))
    assert log.count("those of step 3 were stored") == 1
    assert "disagree about the sampled tokens" not in log
    judged = [m["step"] for m in read_metrics(run.metrics_path) if "mismatch/judged_gap" in m]
    assert judged == [4]


def test_status_says_whether_the_canary_verified_the_version(tmp_path: Path) -> None:
    """All versions of the simulated trainer give the same logprobs: none is told from the one before."""
    run, _, _ = run_of(tmp_path, 0, 2)
    assert [m["canary/verified"] for m in read_metrics(run.metrics_path)] == [0.0, 0.0]
    assert read_status(run.status_path).adapter_verified in (None, False)


class Same:
    async def score(self, items: Sequence[tuple[Prompt, str]]) -> list[Score]:
        return [Score(0.5, {"same": 0.5})] * len(items)


@pytest.mark.parametrize(("name", "compares"), [("grpo", True), ("remax", False)])
def test_equal_rewards_are_recorded_if_the_advantage_compares_groups(
    tmp_path: Path, name: str, compares: bool
) -> None:
    run, _, logged = run_of(tmp_path, 0, 3, algorithm={"name": name}, scorer=Same())
    metrics = read_metrics(run.metrics_path)
    assert ["groups/zero_std_sampled_frac" in m for m in metrics] == [compares] * 3
    assert ["reward/metric/greedy" in m for m in metrics] == [not compares] * 3
    assert ("the policy learns nothing from them" in logged) == compares
