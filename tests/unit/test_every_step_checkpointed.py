"""The trainer's loop writes a checkpoint with each step before it reports the step, and resumes from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

from skylite.config.loading import read_run_config
from skylite.rollout.resume import remove_after
from skylite.run.checkpoint_folder import checkpoint_steps, choose_checkpoint, verify_checkpoint
from skylite.run.run_dir import RunDir
from skylite.trainer import loop
from skylite.trainer.loop import write_step_file
from tests.integration.torchrun import weights
from tests.rows import random_samples
from tests.small_run import lone_rank, make_run, settings

STEPS = {step: random_samples(step) for step in (1, 2, 3)}
CONFIG = settings(num_steps=3, checkpoint={"keep_last": 9}, trainer={"deterministic": True})


def test_a_recorded_step_survives_and_a_resume_is_bit_equal(
    tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = make_run(tmp_path / "straight", tiny_llama, CONFIG, STEPS)
    saved: list[tuple[int, list[int]]] = []

    def report(run: RunDir, dist: object, step: int, *rest: object) -> None:
        saved.append((step, checkpoint_steps(run)))
        write_step_file(run, dist, step, *rest)  # type: ignore[arg-type]

    monkeypatch.setattr(loop, "write_step_file", report)
    monkeypatch.setattr("skylite.trainer.checkpoint.MOST_COST", 1e9)  # a tiny step costs less
    with lone_rank() as dist:
        loop.train(run, read_run_config(run.config_path), dist, resume=False)
        assert saved == [(0, []), (1, [1]), (2, [1, 2]), (3, [1, 2, 3])]
        assert all(verify_checkpoint(run.checkpoint_path(step)) for step in (1, 2, 3))
        body = json.loads(run.trainer_step_path(1).read_text())
        assert body["metrics"]["checkpoint/interval"] == 1.0
        notes = [json.loads(run.trainer_step_path(step).read_text())["notes"] for step in (1, 2, 3)]
        assert list(map(len, notes)) == [0, 1, 0], "printed once, when a step without the start was measured"

        killed = RunDir(tmp_path / "killed")  # after step 2 was recorded
        shutil.copytree(run.root, killed.root)
        config = killed.config_path.read_text().replace(str(run.root), str(killed.root))
        killed.config_path.write_text(config)
        shutil.rmtree(killed.checkpoint_path(3))
        done = choose_checkpoint(killed, None)
        assert done == 2
        remove_after(killed, killed.default_adapters, done, reuse_rollouts=True)
        loop.train(killed, read_run_config(killed.config_path), dist, resume=True)
    for version in (2, 3):
        ours, theirs = weights(killed, version), weights(run, version)
        assert all(np.array_equal(ours[name], theirs[name]) for name in theirs)
    for path in sorted(run.checkpoint_path(3).glob("*.safetensors")):
        again = load_file(killed.checkpoint_path(3) / path.name)
        assert all(np.array_equal(again[name], value) for name, value in load_file(path).items()), path
