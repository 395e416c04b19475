"""Copies beside the steps of a run (`cp -r step-000010 step-000010-backup`) are neither read nor deleted."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from skylite.adapters.retention import clean_up
from skylite.api import load_run
from skylite.config.loading import read_run_config
from skylite.config.train import EvalConfig
from skylite.rollout.replay import copy_for_replay
from skylite.rollout.resume import remove_after
from skylite.run.checkpoint_folder import checkpoint_steps, choose_checkpoint, write_checkpoint_manifest
from skylite.run.metrics_file import held_out_scores
from skylite.run.run_dir import RunDir
from skylite.ui.end_message import stopped_text
from tests.rows import random_samples
from tests.small_run import make_run, settings

COPIES = ("-backup", " (copy)", "~", "0", ".old", "\u0661")
"""What people and tools append to a name. The last one is a digit, but not an ASCII digit."""


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run of two steps with a checkpoint, an evaluation, and copies of every file and folder of a step."""
    run = make_run(
        tmp_path / "run", tmp_path / "model", settings(), {s: random_samples(s) for s in (1, 2, 10)}
    )
    run.checkpoint_path(10).mkdir()
    (run.checkpoint_path(10) / "policy.safetensors").write_bytes(b"weights")
    write_checkpoint_manifest(run.checkpoint_path(10), 10)
    run.trainer_step_path(10).write_text("{}")
    run.evals.mkdir()
    (run.evals / "step-v000010.json").write_text(
        '{"mean": 0.5, "is_binary": true, "version": 10, "split": "test", "limit": 4}'
    )
    for end in COPIES:
        shutil.copytree(run.checkpoint_path(10), run.checkpoints / f"step-000010{end}")
        for file in (run.rollout_path(10), run.trainer_step_path(10), run.evals / "step-v000010.json"):
            shutil.copy(file, file.with_name(f"{file.stem}{end}{file.suffix}"))
            shutil.copy(file, file.with_name(f"{file.name}{end}"))
    return run


def test_copies_are_no_checkpoints(run: RunDir) -> None:
    assert checkpoint_steps(run) == [10]
    assert choose_checkpoint(run, None) == 10
    assert "Saved: checkpoint step-000010." in stopped_text(run, run.default_adapters)


def test_a_clean_up_and_a_resume_leave_copies_alone(run: RunDir) -> None:
    clean_up(run, run.default_adapters, 10, settings(checkpoint={"keep_last": 1}))
    assert run.checkpoint_path(10).is_dir()
    copies = [p for p in run.root.rglob("step-*10*") if p.suffix != ".safetensors"]
    own = {
        run.checkpoint_path(10),
        run.rollout_path(10),
        run.trainer_step_path(10),
        run.evals / "step-v000010.json",
    }
    remove_after(run, run.default_adapters, 2, reuse_rollouts=False)
    assert not any(p.exists() for p in own)
    assert all(p.exists() for p in copies if p not in own)


def test_scores_api_and_replay_ignore_copies(run: RunDir, tmp_path: Path) -> None:
    (run.evals / "step-v000010-backup.json").write_text("{")
    assert held_out_scores(run, EvalConfig(split="test", limit=4)) == {10: 0.5}
    assert load_run(run.root).steps == [1, 2, 10]
    replay = copy_for_replay(run, read_run_config(run.config_path), RunDir(tmp_path / "replay"), 0, 10)
    assert sorted(p.name for p in replay.rollouts.iterdir()) == [f"step-{s:06d}.parquet" for s in (1, 2, 10)]
