"""Signals to a whole process group or job, and a run whose parent is killed."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skylite.api import load_run
from skylite.cli.runs import facts_of
from skylite.processes.reaper import COMMAND_PID
from skylite.run.own_folders import LOCK_NAME, lock_folder
from skylite.run.status import current_status
from tests.made_up_runs import write_made_up_run

REWARD = """
import subprocess, time
def reward(prompt, completion):
    if completion == "slow":
        with subprocess.Popen(["sleep", "2"]) as program:  # in the group of its worker
            return 1.0 if program.wait() == 0 else 0.0
    if completion == "ends it":
        with subprocess.Popen(["sleep", "600"]) as program:
            program.terminate()
            return 1.0 if program.wait() == -15 else 0.0
    return 0.5
"""
SCORE = """
import asyncio, os, signal, sys
from pathlib import Path
from skylite.rewards.worker_pool import RewardPool
from tests.unit.data_cases import prompt

def main():
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    pool = RewardPool([sys.argv[1] + ":reward"], num_workers=2)
    asyncio.run(pool.score([(prompt(), "x"), (prompt(), "y")]))
    print(*(worker.pid for worker in pool._workers), flush=True)
    scores = asyncio.run(pool.score([(prompt(), "slow"), (prompt(), "ends it"), (prompt(), "x")]))
    print(*(score.value if hasattr(score, "value") else score.reward for score in scores), flush=True)
    pool.close()

if __name__ == "__main__":
    main()
"""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_workers_and_their_programs_leave_signals_to_the_parent(number: int, tmp_path: Path) -> None:
    """As `timeout` sends them to a group, and a scheduler to every process of a job."""
    (tmp_path / "mine.py").write_text(REWARD)
    (tmp_path / "score.py").write_text(SCORE)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "score.py"), str(tmp_path / "mine.py")],
        stdout=subprocess.PIPE,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONPATH": str(Path(__file__).parents[2])},
    ) as parent:
        assert parent.stdout is not None
        workers = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(workers) == 2
        time.sleep(0.5)  # "slow" runs
        os.killpg(parent.pid, number)
        for worker in workers:
            os.kill(worker, number)
        assert parent.stdout.readline().split() == ["1.0", "1.0", "0.5"]
        assert parent.wait(30) == 0


PARENT = """
import sys, time
from pathlib import Path
from skylite.run.own_folders import lock_folder
with lock_folder(Path(sys.argv[1])):
    print("locked", flush=True)
    time.sleep(600)
"""


def test_a_killed_run_is_dead_in_every_command(tmp_path: Path) -> None:
    run = write_made_up_run(tmp_path, "healthy", steps=2, phase="training")
    run.root.chmod(0o700)
    with subprocess.Popen(
        [sys.executable, "-c", PARENT, str(run.root)], stdout=subprocess.PIPE, text=True
    ) as parent:
        assert parent.stdout is not None
        assert parent.stdout.readline() == "locked\n"
        assert current_status(run.root).phase == "training"
        assert facts_of(run.root)["phase"] == "training"
        parent.kill()
    assert current_status(run.root).phase == "dead"
    assert facts_of(run.root)["phase"] == "dead"


def test_a_run_without_its_process_is_dead_whatever_its_status_says(tmp_path: Path) -> None:
    """After a power cut; its process id belongs to another program by now."""
    run = write_made_up_run(tmp_path, "healthy", steps=2, phase="training")
    run.root.chmod(0o700)
    body = json.loads(run.status_path.read_text())
    run.status_path.write_text(json.dumps({**body, "pids": {"skylite": os.getpid()}}))
    with lock_folder(run.root):
        assert load_run(run.root).status.phase == "training"
    (run.root / LOCK_NAME).touch()  # as a kill leaves it
    assert load_run(run.root).status.phase == "dead"
    assert facts_of(run.root)["phase"] == "dead"


def test_a_rank_whose_torchrun_ended_while_it_started_ends_before_it_imports_anything_slow(
    tmp_path: Path,
) -> None:
    (tmp_path / "pydantic.py").write_text(f"open({str(tmp_path / 'imported')!r}, 'w')")
    env = {**os.environ, "PYTHONPATH": str(tmp_path), COMMAND_PID: str(os.getppid())}
    rank = [sys.executable, "-m", "skylite.trainer.worker", str(tmp_path)]
    assert subprocess.run(rank, env=env, timeout=60, check=False).returncode == 1
    assert not (tmp_path / "imported").exists()
    env[COMMAND_PID] = str(os.getpid())
    assert subprocess.run(rank, env=env, capture_output=True, timeout=60, check=False).returncode == 1
    assert (tmp_path / "imported").exists(), "so that this test can fail"
