"""`skylite replay`: the inputs of the second trainer and its time limit."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from skylite.adapters.manifest import Canary, Manifest
from skylite.config.loading import read_run_config
from skylite.errors import RunFailed
from skylite.rollout.replay import copy_for_replay, replay_step
from skylite.run.files import sha256_file
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from tests.rows import random_samples
from tests.small_run import make_run, settings


def finished_run(root: Path, **sections: Any) -> RunDir:
    """A run that published version 1."""
    run = make_run(root, root.parent / "model", settings(**sections), {1: random_samples(1)})
    adapter = AdapterVersion(1, run.default_adapters / adapter_name(1))
    adapter.path.mkdir()
    adapter.weights_path.write_bytes(b"weights")
    manifest = Manifest(
        version=1,
        step=1,
        parent=0,
        weights_sha256=sha256_file(adapter.weights_path),
        weights_bytes=7,
        base_model="b",
        base_fingerprint="f",
        rank=4,
        alpha=8.0,
        dtype="float32",
        target_modules=["q_proj"],
        canary=Canary(sequences=[[1, 2]], policy_logprobs=[[-1.0]], base_logprobs=[[-1.0]]),
    )
    adapter.manifest_path.write_text(manifest.model_dump_json())
    return run


def test_micro_batches_are_the_same_as_in_the_run(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", trainer={"tokens_per_micro_batch": "auto"})
    recorded = read_run_config(run.config_path)
    assert not copy_for_replay(run, recorded, RunDir(tmp_path / "fixed"), 0, 1).micro_batch_path.exists()
    run.micro_batch_path.write_text('{"tokens": 96, "reason": "halved later", "setting": "auto"}')
    run.trainer_step_path(1).write_text('{"tokens_per_micro_batch": 192}')
    again = copy_for_replay(run, recorded, RunDir(tmp_path / "auto"), 0, 1)
    assert again.read_json(again.micro_batch_path)["tokens"] == 192


def test_a_trainer_that_exceeds_its_limit_is_ended_with_a_reason(tmp_path: Path) -> None:
    run = finished_run(tmp_path / "run", trainer={"step_timeout_s": 0.2})
    with pytest.raises(RunFailed, match=r"did not finish step 0 within 0.2 s \(trainer.step_timeout_s\)"):
        asyncio.run(replay_step(run, 1, {}))
