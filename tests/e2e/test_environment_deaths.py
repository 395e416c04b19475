"""Episodes whose engine or run is killed in the middle: the run equals an undisturbed one."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path
from subprocess import Popen

import pytest

from skylite.run.run_dir import RunDir
from tests.e2e.project import Project, descendants, torn
from tests.e2e.running import DEADLINE_S, command_of, running, wait_for_step, wait_gone
from tests.fakes.launcher import SERVER
from tests.torture.evidence import digests, finished_steps
from tests.torture.ground import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
STEPS = 4
EPISODE = """
import os

def note(event):
    with open(os.environ["EPISODE_EVENTS"], "a") as stream:
        stream.write(event)

async def episode(task, chat):
    note("(")
    messages, letters = list(task.messages), 0
    for turn in range(3):
        reply = await chat(messages)
        letters += sum(c.isascii() and c.isalpha() for c in reply.text)
        messages += [reply.message, {"role": "user", "content": f"again {turn}"}]
    note(")")
    return letters / 36
"""


@pytest.fixture
def args(project: Project, monkeypatch: pytest.MonkeyPatch, fake_engine: None) -> Callable[[str], list[str]]:
    """The words of a run on three-turn episodes; every completion takes 0.1 s."""
    monkeypatch.setenv("ENGINE_DELAY_S", "0.1")
    (project.root / "game.py").write_text(EPISODE)
    chosen = (*SETTINGS, "eval.limit=0", "checkpoint.every=1", "sync.keep_last=100", "env.max_tokens=400")
    settings = [word for setting in chosen for word in ("--set", setting)]
    few = ["--set", "rollout.prompts_per_step=2", "--env", "game.py:episode"]

    def words(run: str) -> list[str]:
        monkeypatch.setenv("EPISODE_EVENTS", str(project.root / f"{run}.events"))
        return project.train_args(run, STEPS, *settings, *few)

    return words


def test_an_engine_and_a_run_killed_during_episodes_leave_the_same_adapters(
    project: Project, args: Callable[[str], list[str]]
) -> None:
    done = project.run(*args("episodes-calm"), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr

    with running(project, *args("episodes-struck")) as process:
        wait_for_step(project, process, "episodes-struck", 1)
        wait_until_in_episodes(project, process)
        command_of(descendants(process.pid), str(SERVER)).kill()
        wait_for_step(project, process, "episodes-struck", 3)
        assert project.status("episodes-struck")["restarts"] == {"engine-0": 1}
        wait_until_in_episodes(project, process)
        children = descendants(process.pid)
        process.kill()
        assert wait_gone(children) == []
    assert torn(project.root / "episodes-struck") == []
    resumed = project.run("train", "--resume", "episodes-struck", timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr

    calm, struck = RunDir(project.root / "episodes-calm"), RunDir(project.root / "episodes-struck")
    assert sorted(digests(calm)) == list(range(STEPS + 1))
    assert digests(struck) == digests(calm)
    assert [m["reward/mean"] for m in project.metrics("episodes-struck")] == [
        m["reward/mean"] for m in project.metrics("episodes-calm")
    ]
    assert len(set(digests(calm).values())) == STEPS + 1, "every step trained"
    assert list(finished_steps(struck)) == list(range(1, STEPS + 1))


def wait_until_in_episodes(project: Project, process: Popen[str]) -> None:
    """Wait until some episodes of a step have ended and others have not."""
    events, deadline = Path(os.environ["EPISODE_EVENTS"]), time.monotonic() + DEADLINE_S
    known = len(events.read_text())
    while True:
        text = events.read_text()
        if len(text) > known and text.count("(") > text.count(")"):
            return
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline
        time.sleep(0.01)
