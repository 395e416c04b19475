"""Two runs on one folder: the second is refused, names the first's pid and writes nothing."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from skylite.run.run_dir import RunDir
from tests.unit.bad_inputs import Reply, call, snapshot
from tests.unit.run_cases import begin
from tests.unit.test_lock import HOLD


@contextmanager
def live(folder: Path) -> Iterator[int]:
    """Pid of another process that owns the folder."""
    owner = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"held\n"
    try:
        yield owner.pid
    finally:
        owner.communicate()


def start(root: Path, name: str, *more: str) -> Reply:
    """Start a new run on the model and data of `begin`."""
    return call(
        [
            "train",
            "--recipe",
            "gsm8k_cpu",
            "--model",
            str(root / "model"),
            "--data",
            str(root / "data"),
            "--run",
            str(root / name),
            "--set",
            "data.difficulty=[]",
            "--set",
            "eval.limit=0",
            "--set",
            "rollout.prompts_per_step=4",
            *more,
        ]
    )


@pytest.fixture
def run(tmp_path: Path) -> RunDir:
    """A run with a separate sync folder for its adapters."""
    return begin(tmp_path, lora_sync_path=str(tmp_path / "sync"))


def test_start_resume_and_clean_up_of_a_live_run_are_refused_with_its_pid(
    run: RunDir, tmp_path: Path
) -> None:
    with live(run.root) as pid:
        before = snapshot(tmp_path)
        for reply in (
            start(tmp_path, "run"),
            call(["train", "--resume", str(run.root)]),
            call(["train", "--resume", str(run.root), "--steps", "1", "--at", "7"]),
            call(["adapters", "gc", str(run.root)]),
        ):
            assert reply.code == 2
            assert f"{run.root} belongs to another live run (pid {pid})" in reply.output
        assert snapshot(tmp_path) == before
        assert call(["train", "--resume", str(run.root), "--dry-run"]).code == 0
        assert snapshot(tmp_path) == before
    assert "holds a run already" in start(tmp_path, "run").output


def test_a_live_runs_sync_folder_is_refused_and_no_run_folder_is_left(run: RunDir, tmp_path: Path) -> None:
    with live(tmp_path / "sync") as pid:
        before = snapshot(tmp_path)
        reply = start(tmp_path, "second", "--set", f"lora.lora_sync_path={tmp_path / 'sync'}")
        assert reply.code == 2
        assert f"{tmp_path / 'sync'} belongs to another live run (pid {pid})" in reply.output
        assert snapshot(tmp_path) == before


def test_a_dead_runs_adapters_are_refused_and_no_run_folder_is_left(run: RunDir, tmp_path: Path) -> None:
    before = snapshot(tmp_path)
    reply = start(tmp_path, "second", "--set", f"lora.lora_sync_path={tmp_path / 'sync'}")
    assert reply.code == 2
    assert f"{tmp_path / 'sync'} holds adapters of another run, such as policy-v000000" in reply.output
    assert {k: v for k, v in snapshot(tmp_path).items() if k != "sync"} == {
        k: v for k, v in before.items() if k != "sync"
    }
