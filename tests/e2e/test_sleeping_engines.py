"""engine.sleep: engines and trainer take turns. A real trainer; the engine refuses all while it sleeps."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time

import psutil
import pytest

from skylite.rollout.session import read_events
from skylite.run.run_dir import RunDir, adapter_name
from tests.alive import is_alive
from tests.e2e.project import FAKE_WORDS, Project, descendants
from tests.e2e.running import DEADLINE_S, check_metrics, running, wait_for_step, words_of
from tests.torture.ground import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
STEPS = 4
WEIGHTS = ("engine.sleep=weights",)


def arguments(project: Project, run: str, *more: str) -> list[str]:
    settings = (*SETTINGS, "eval.limit=0", "checkpoint.every=100", "sync.keep_last=100", *more)
    return project.train_args(run, STEPS, *FAKE_WORDS, *(w for s in settings for w in ("--set", s)))


def trained(project: Project, run: str, *more: str) -> RunDir:
    done = project.run(*arguments(project, run, *more), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    return RunDir(project.root / run)


def weights(run: RunDir) -> list[bytes]:
    """Of all versions."""
    folders = (run.default_adapters / adapter_name(version) for version in range(STEPS + 1))
    return [(folder / "adapter_model.safetensors").read_bytes() for folder in folders]


@pytest.fixture(scope="module")
def awake(project: Project) -> list[bytes]:
    """The adapters of a run whose engine never sleeps."""
    return weights(trained(project, "awake"))


def moved_mib(run: RunDir) -> float:
    """Of the base, from the trainer's log."""
    found = re.search(r"engine.sleep=weights: ([\d.]+) MiB", run.log_path("trainer").read_text())
    assert found is not None
    return float(found[1])


def wait_until_asleep(
    project: Project, process: subprocess.Popen[str], run: str, step: int
) -> list[psutil.Process]:
    """The engines, once they sleep before the step is trained."""
    path, deadline = RunDir(project.root / run).events_path, time.monotonic() + DEADLINE_S
    while not (
        path.exists()
        and {("engines_asleep", step)} & {(e["event"], e.get("step")) for e in read_events(path)}
    ):
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)
    return [p for p in descendants(process.pid) if "tests/fakes/engine.py" in " ".join(words_of(p)[1:2])]


def check_turns(run: RunDir) -> None:
    """Check that the trainer computed each step while the engines slept, and nobody asked them meanwhile."""
    events = read_events(run.events_path)
    starts = [i for i, event in enumerate(events) if event["event"] == "run_started"]
    events = events[starts[-1] :]
    steps = [e["step"] for e in events if e["event"] == "engines_asleep"]
    assert steps == [*range(STEPS + 1 - len(steps), STEPS + 1)]
    assert steps, "the engines slept"
    for step in steps:
        at = {e["event"]: e["monotonic"] for e in events if e.get("step") == step}
        loaded = next(e for e in events if e["event"] == "adapter_loaded" and e["version"] == step)
        started, ended = run.read_json(run.trainer_step_path(step))["trained"]
        order = [at["rollouts_written"], at["engines_asleep"], started, ended, at["engines_awake"]]
        assert [*order, loaded["monotonic"]] == sorted([*order, loaded["monotonic"]])


def test_a_cache_that_is_lent_changes_no_bit(project: Project, awake: list[bytes]) -> None:
    run = trained(project, "lent-cache", "engine.sleep=kv_cache")
    check_turns(run)
    assert weights(run) == awake
    metrics = project.metrics("lent-cache")
    assert [m["step"] for m in metrics] == [*range(1, STEPS + 1)]
    assert all(m["time/engine_sleep_s"] > 0 for m in metrics)
    assert not any("time/base_copies_s" in m for m in metrics)


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_base_that_leaves_changes_no_bit(project: Project, ranks: int) -> None:
    """In bfloat16, because torch maps the model's float32 file, and a mapping stays. Two ranks shard it."""
    more = ("model.dtype=bfloat16", f"trainer.num_ranks={ranks}", "shared_network=true")
    awake = trained(project, f"here-{ranks}", *more)
    asleep = trained(project, f"away-{ranks}", *more, *WEIGHTS)
    check_turns(asleep)
    assert weights(asleep) == weights(awake)
    assert moved_mib(asleep) > 0.05
    assert all(m["time/base_copies_s"] > 0 for m in project.metrics(f"away-{ranks}"))


def test_an_engine_that_dies_asleep_starts_again_when_it_is_needed(
    project: Project, awake: list[bytes]
) -> None:
    with running(project, *arguments(project, "dies-asleep", *WEIGHTS)) as process:
        (engine,) = wait_until_asleep(project, process, "dies-asleep", step=2)
        engine.kill()
        assert process.wait(DEADLINE_S) == 0
    run = RunDir(project.root / "dies-asleep")
    check_turns(run)
    assert weights(run) == awake
    assert project.metrics("dies-asleep")[-1]["restarts"] == 1


def test_a_killed_run_takes_turns_over_its_stored_rollouts(project: Project, awake: list[bytes]) -> None:
    with running(project, *arguments(project, "killed-asleep", *WEIGHTS)) as process:
        wait_for_step(project, process, "killed-asleep", 2)
        below = descendants(process.pid)
        os.kill(process.pid, signal.SIGKILL)
        process.wait()
    _, alive = psutil.wait_procs(below, timeout=15)
    assert not [p for p in alive if is_alive(p)]
    done = project.run("train", "--resume", "killed-asleep", timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    run = RunDir(project.root / "killed-asleep")
    check_turns(run)
    assert weights(run) == awake
    assert project.metrics("killed-asleep")[0]["rollout/stored"] == 1.0
    replayed = project.run("replay", "killed-asleep", "--step", "2")
    assert replayed.returncode == 0, replayed.stderr


SLEEPY = """
from skylite.engine.vllm.launcher import VllmLauncher

class Sleepy(VllmLauncher):
    def check_sleep(self, device, lends):
        pass
"""


def test_real_vllm_sleeps_wakes_and_samples_on(project: Project) -> None:
    """On a CPU it stops at our route until it wakes, and frees nothing: so skylite refuses it there."""
    (project.root / "sleepy.py").write_text(SLEEPY)
    settings = ("engine.launcher=sleepy.py:Sleepy", "engine.sleep=weights", "eval.limit=0")
    words = [word for setting in settings for word in ("--set", setting)]
    done = project.run(*project.train_args("sleepy", STEPS, *words), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    run = RunDir(project.root / "sleepy")
    check_turns(run)
    check_metrics(project, "sleepy")
    assert "seconds to fall asleep" in run.log_path("engine-0").read_text()


def test_vllm_refuses_to_sleep_on_a_cpu(project: Project) -> None:
    done = project.run(*project.train_args("refused", STEPS, "--set", "engine.sleep=kv_cache", "--dry-run"))
    assert done.returncode == 2
    assert (
        "engine.sleep=kv_cache lends a part of a GPU to the trainer, and this run has no GPU" in done.stderr
    )
    assert "Traceback" not in done.stderr
