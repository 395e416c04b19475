"""What a resume removes and keeps, even if it is killed at any point."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from skylite.rollout.resume import remove_after
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir
from tests.logs import logged_messages
from tests.rows import random_samples, write_samples


def leave_behind(run: RunDir) -> None:
    """Steps 1 to 5, a checkpoint of step 3, a stray one of step 5, and files of a killed writer."""
    for folder in (run.rollouts, run.trainer_steps, run.checkpoints, run.evals, run.default_adapters):
        folder.mkdir()
    for step in range(6):
        run.trainer_step_path(step).write_text("{}")
        (run.default_adapters / f"policy-v{step:06d}").mkdir()
        if step:
            write_samples(run.rollout_path(step), random_samples(step))
    for step in (3, 5):
        run.checkpoint_path(step).mkdir()
    (run.evals / "step-v000005.json").write_text("{}")
    (run.evals / "step-v000003.json").write_text("{}")
    (run.default_adapters / ".policy-v000006.tmp-77").mkdir()
    run.logs.mkdir()
    for file in (run.root / ".status.json.tmp-77", run.logs / ".trainer-error.json.tmp-77"):
        file.touch()
    (run.root / ".events.jsonl.tmp-77").symlink_to(run.rollouts)
    run.metrics_path.write_text(
        "".join(json.dumps({"step": s}) + "\n" for s in range(1, 6)) + '{"step": 6, "torn'
    )


def test_only_files_after_the_checkpoint_are_removed(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    assert remove_after(run, run.default_adapters, 3, reuse_rollouts=False) == 2
    assert sorted(p.name for p in run.default_adapters.iterdir()) == [f"policy-v{v:06d}" for v in range(4)]
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in (1, 2, 3)]
    assert sorted(run.trainer_steps.iterdir()) == [run.trainer_step_path(s) for s in range(3)]
    assert [p.name for p in run.evals.iterdir()] == ["step-v000003.json"]
    assert checkpoint_steps(run) == [3]
    assert not list(run.root.rglob(".*"))
    assert [json.loads(line)["step"] for line in run.metrics_path.read_text().splitlines()] == [1, 2, 3]


@pytest.mark.parametrize(("broken", "kept"), [(None, [1, 2, 3, 4, 5]), (5, [1, 2, 3, 4]), (4, [1, 2, 3])])
def test_stored_rollouts_are_kept_up_to_the_first_damaged_one(
    tmp_path: Path, broken: int | None, kept: list[int]
) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    if broken is not None:
        run.rollout_path(broken).write_bytes(b"PAR1")
    with logged_messages() as logged:
        remove_after(run, run.default_adapters, 3, reuse_rollouts=True)
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in kept]
    assert any("stored rollouts" in text for text in logged) == (len(kept) > 3)
    assert any("sampled again" in text for text in logged) == (broken is not None)


def test_the_rollouts_of_a_rejected_step_are_sampled_again(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    (run.rejected_steps / "step-000004").mkdir(parents=True)
    remove_after(run, run.default_adapters, 3, reuse_rollouts=True)
    assert sorted(run.rollouts.iterdir()) == [run.rollout_path(s) for s in (1, 2, 3)]


def test_a_finished_step_that_the_dead_parent_did_not_record_is_recorded(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    run.trainer_step_path(2).unlink()
    run.trainer_step_path(3).write_text(
        json.dumps({"metrics": {"policy/entropy": 0.5}, "skipped": "loss/policy is nan"})
    )
    run.metrics_path.write_text(json.dumps({"step": 1}) + "\n")
    assert remove_after(run, run.default_adapters, 3, reuse_rollouts=False) == 0
    _, untold, last = read_metrics(run.metrics_path)
    assert (untold["step"], untold["policy/entropy"]) == (2, None)
    rewards = [s.reward for s in random_samples(3)]
    assert (last["step"], last["policy/entropy"], last["anomaly/reason"]) == (3, 0.5, "loss/policy is nan")
    assert last["reward/mean"] == pytest.approx(sum(rewards) / len(rewards))
    assert last["canary/gap_max"] is None, "no engine has verified it"
    assert [m["step"] for m in read_metrics(run.metrics_path)] == [1, 2, 3]


def test_an_update_file_emptied_by_a_power_cut_is_reported(tmp_path: Path) -> None:
    run = RunDir(tmp_path)
    leave_behind(run)
    run.trainer_step_path(2).write_text("")
    run.trainer_step_path(3).write_text('{"metrics": {')
    run.metrics_path.write_text(json.dumps({"step": 1}) + "\n")
    with logged_messages() as logged:
        remove_after(run, run.default_adapters, 3, reuse_rollouts=False)
    assert [(m["step"], m.get("policy/entropy")) for m in read_metrics(run.metrics_path)] == [
        (1, None),
        (2, None),
        (3, None),
    ]
    assert ["metrics of step 2 are unknown" in logged[0], "metrics of step 3 are unknown" in logged[1]] == [
        True,
        True,
    ]


CHANGES = ("rename", "replace", "unlink", "rmdir")
"""Functions of `os` that remove or replace a file name."""


def dies_at(number: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[], object]) -> bool:
    """Run `work` and stop it at file name change `number`. False if it made fewer changes."""
    calls = 0

    def counted(real: Callable[..., None]) -> Callable[..., None]:
        def change(*args: Any, **kwargs: Any) -> None:
            nonlocal calls
            calls += 1
            if calls >= number:
                raise KeyboardInterrupt
            real(*args, **kwargs)

        return change

    with monkeypatch.context() as patch:
        for name in CHANGES:
            patch.setattr(os, name, counted(getattr(os, name)))
        try:
            work()
        except KeyboardInterrupt:
            return True
    return False


def test_a_kill_during_cleanup_leaves_no_checkpoint_without_its_files(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Kill at every file name change. A resume then continues from the newest remaining checkpoint."""
    for number in range(1, 100):
        run = RunDir(tmp_path / str(number))
        run.root.mkdir()
        leave_behind(run)
        for step in (3, 4, 5):
            (run.checkpoint_path(step)).mkdir(exist_ok=True)
            (run.checkpoint_path(step) / "manifest.json").touch()
            (run.default_adapters / f"policy-v{step:06d}" / "manifest.json").touch()
        run.metrics_path.write_text(json.dumps({"step": 1}) + "\n")
        run.trainer_step_path(3).write_text(json.dumps({"metrics": {"policy/entropy": 0.5}}))
        died = dies_at(
            number,
            monkeypatch,
            partial(remove_after, run, run.default_adapters, 3, reuse_rollouts=False),
        )
        newest = checkpoint_steps(run)[-1]
        assert all((run.checkpoint_path(s) / "manifest.json").exists() for s in checkpoint_steps(run))
        assert all(run.rollout_path(s).exists() for s in range(1, newest + 1))
        assert all(
            (run.default_adapters / f"policy-v{v:06d}" / "manifest.json").exists()
            for v in range(3, newest + 1)
        )
        remove_after(run, run.default_adapters, newest, reuse_rollouts=True)
        assert [m["step"] for m in read_metrics(run.metrics_path)] == list(range(1, newest + 1))
        assert read_metrics(run.metrics_path)[2]["policy/entropy"] == 0.5, (
            "the record of a finished step is not lost either"
        )
        assert not list(run.root.rglob(".*"))
        if not died:
            break
    assert number > 10
