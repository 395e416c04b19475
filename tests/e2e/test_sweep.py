"""A sweep on the fake engine: each policy gets the adapters that it gets alone; one that fails or is stopped
leaves the others alone; a killed sweep resumes; an engine or trainer that dies is replaced."""

from __future__ import annotations

import hashlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

import psutil
import pytest

from skylite.run.run_dir import RunDir, published_versions
from skylite.run.status import read_status
from tests.e2e.project import Project, descendants
from tests.e2e.running import DEADLINE_S, wait_gone

pytestmark = [pytest.mark.e2e, pytest.mark.dist, pytest.mark.usefixtures("fake_engine")]
STEPS = 3
EXACT = ("--set", "trainer.deterministic=true", "--set", "eval.limit=0", "--set", "checkpoint.every=1")


def sweep_args(project: Project, *extra: str, steps: int = STEPS) -> list[str]:
    """The arguments of `skylite sweep` for the project's data, without a rank and rate of their own."""
    args = project.train_args("unused", steps)[1:]
    for flag in ("--run", "--rank", "--lr"):
        place = args.index(flag)
        del args[place : place + 2]
    return ["sweep", *args, *EXACT, "--out", "sweep", *extra]


def hashes(run: Path) -> dict[int, str]:
    """Of all published adapters."""
    folder = RunDir(run).default_adapters
    return {
        a.version: hashlib.sha256(a.weights_path.read_bytes()).hexdigest() for a in published_versions(folder)
    }


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def train_alone(project: Project, name: str, *extra: str, steps: int = STEPS) -> Path:
    """The lone run of a policy."""
    args = sweep_args(project, *extra, steps=steps)
    args[0], args[args.index("--out")] = "train", "--run"
    args[args.index("sweep", 1)] = name
    done = project.run(*args)
    assert done.returncode == 0, done.stderr
    return project.root / name


def test_each_policy_gets_the_adapters_of_its_lone_run(project: Project) -> None:
    """Also if the sweep is halved after step 2, killed when the first policy has got there, and resumed."""
    keep, root = ("--set", "sync.keep_last=9"), project.root / "sweep"
    grid = ("--grid", "lora.rank=4,8", "--grid", 'lora.target_modules=["q_proj","v_proj"],all-linear')
    halve = ("--set", "eval.limit=4", "--set", "eval.every=2", "--halve-every", "2", "--together", "3")
    process = project.start(*sweep_args(project, *grid, *keep, *halve))
    try:
        wait_until((root / "rungs.json").exists)
    finally:
        kill_all(process)
    done = project.run("sweep", "--resume", "sweep")
    assert done.returncode == 0, done.stderr
    policies = json.loads((root / "sweep.json").read_text())["policies"]
    names = [f"rank-{r}_target_modules-{t}" for r in (4, 8) for t in ("q-proj-v-proj", "all-linear")]
    assert [*policies] == names
    scores = {n: json.loads((root / n / "evals/step-v000002.json").read_text())["mean"] for n in names}
    stay = [n for n in names if sum(score > scores[n] for score in scores.values()) < 2]
    assert len(stay) == 2, scores
    assert {n: number_of_steps(RunDir(root / n)) for n in names} == {n: 2 + (n in stay) for n in names}
    chosen = [w for k, v in policies[stay[-1]].items() for w in ("--set", f"{k}={json.dumps(v)}")]
    alone = train_alone(project, "alone-of-sweep", *chosen, *keep)
    assert len(hashes(alone)) == STEPS + 1
    assert hashes(root / stay[-1]) == hashes(alone)
    table = done.stdout.splitlines()
    assert sum("done" in line and "step 3" in line for line in table) == 2
    assert sum("left" in line and "2 of 4 were higher" in line for line in table) >= 1
    report = project.run("report", "sweep")
    assert report.returncode == 0, report.stderr
    assert table[-1] in report.stdout
    assert all(name in (project.root / "report-sweep.html").read_text() for name in names)


def test_failures_leave_the_others_alone_and_a_killed_sweep_resumes(project: Project) -> None:
    """Two collapse, engine and trainer are killed, one is stopped, then the command is killed."""
    steps, root = 24, project.root / "faults"
    rule = ("--set", "anomaly.min_reward_steps=1", "--max-restarts", "1")
    args = sweep_args(project, *rule, "--grid", "anomaly.min_reward=none,2.0", "--seeds", "0,1", steps=steps)
    args[args.index("sweep", 1)] = "faults"
    process = project.start(*args)
    try:
        good, stopped = (RunDir(root / f"min_reward-none_seed-{seed}") for seed in (0, 1))
        lost = [RunDir(root / f"min_reward-2.0_seed-{seed}") for seed in (0, 1)]
        wait_until(lambda: has_step(good, 1))
        wait_until(
            lambda: all(r.status_path.exists() and read_status(r.status_path).phase == "failed" for r in lost)
        )
        for name in ("tests/fakes/engine.py", "skylite.trainer.worker"):
            before = number_of_steps(good)
            kill(process.pid, name)
            wait_until(partial(has_step, good, before + 1))
        project.run("sweep", "stop", str(stopped.root))
        wait_until(lambda: read_status(stopped.status_path).phase == "stopped" or has_step(stopped, steps))
    finally:
        kill_all(process)
    at = number_of_steps(stopped)
    resumed = project.run("sweep", "--resume", "faults")
    assert "under anomaly.min_reward=2" in str(read_status(lost[0].status_path).error)
    assert resumed.returncode == 0, resumed.stderr
    assert number_of_steps(good) == steps
    assert number_of_steps(stopped) == at, "a policy that the user stopped is not resumed"
    alone = train_alone(project, "alone", "--set", "seed=0", steps=steps)
    last = RunDir(alone).default_adapters / f"policy-v{steps:06d}/adapter_model.safetensors"
    assert last.read_bytes() == (good.default_adapters / last.parent.name / last.name).read_bytes()


def kill_all(process: subprocess.Popen[str]) -> None:
    """Kill the command, and wait until all that it started is gone."""
    tree = descendants(process.pid)
    process.kill()
    process.wait()
    wait_gone(tree)


def number_of_steps(run: RunDir) -> int:
    return len(run.metrics_path.read_text().splitlines()) if run.metrics_path.exists() else 0


def has_step(run: RunDir, step: int) -> bool:
    return number_of_steps(run) >= step


def kill(parent: int, name: str) -> None:
    """Kill the processes below `parent` whose command line has the name and that run no other program."""
    found = [
        p
        for p in psutil.Process(parent).children(recursive=True)
        if any(name in word for word in p.cmdline())
        and not any(w.rpartition(".")[2] == "run" for w in p.cmdline())
    ]
    assert found
    os.kill(found[-1].pid, signal.SIGKILL)
