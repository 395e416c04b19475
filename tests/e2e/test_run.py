"""The program through its command line: train, stop, resume."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S, running

pytestmark = [pytest.mark.e2e, pytest.mark.dist]


@pytest.mark.usefixtures("fake_engine")
def test_a_run_stops_at_its_time_limit_and_trains_on_after_it(project: Project) -> None:
    """test_finished_run.py stops and resumes a run with vLLM."""
    stopped = project.run(*project.train_args("run", 40, "--max-hours", "0.0001"), timeout_s=DEADLINE_S)
    assert stopped.returncode == 0, stopped.stderr
    assert "--max-hours 0.0001: stopping" in stopped.stderr
    assert [m["step"] for m in project.metrics("run")] == [1]
    assert project.status("run")["phase"] == "stopped"
    done = int(sorted((project.root / "run" / "checkpoints").iterdir())[-1].name.removeprefix("step-"))
    assert f"step-{done:06d}" in stopped.stderr

    resumed = project.run("train", "--resume", "run", "--steps", str(done + 2), timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    steps = [m["step"] for m in project.metrics("run")]
    assert steps[-2:] == [done + 1, done + 2]
    assert project.status("run")["phase"] == "done"
    log = (project.root / "run" / "logs" / "skylite.log").read_text()
    assert f": step {done}/40  reward" in log
    assert f" after step {done} of {done + 2}" in log
    assert f": step {done + 2}/{done + 2}  reward" in log
    assert sorted((project.root / "run" / "evals").glob("after-*.parquet"))


@pytest.mark.usefixtures("fake_engine")
def test_two_runs_cannot_share_a_sync_folder(project: Project, tmp_path: Path) -> None:
    shared = f"lora.lora_sync_path={tmp_path / 'sync'}"
    with running(project, *project.train_args("first", 600, "--set", shared)) as process:
        deadline = time.monotonic() + 60
        while not (project.root / "first" / "status.json").exists():
            assert time.monotonic() < deadline
            assert process.poll() is None
            time.sleep(0.05)
        second = project.run(*project.train_args("second", 1, "--set", shared))
        assert second.returncode == 2
        assert f"belongs to another live run (pid {process.pid})" in second.stderr
        assert not (project.root / "second").exists()
        assert "Traceback" not in second.stderr
