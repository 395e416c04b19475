"""The end of an episode: its time limit, engines that fail meanwhile, and the processes that it started."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.interface import Sampling
from skylite.engine.retrying_engine import RetryingEngine
from skylite.errors import EngineFailed
from skylite.types import Call, EncodedPrompt
from tests.unit.environment_cases import ScriptedEngine, environment, make_prompt, make_request, sample
from tests.unit.test_episodes import THREE_TURNS


@pytest.mark.parametrize("body", ["await asyncio.sleep(60)", "time.sleep(60)", "\n        while True: pass"])
def test_an_episode_that_hangs_ends_in_time(tmp_path: Path, body: str) -> None:
    source = f"""
    import asyncio, time
    async def episode(task, chat):
        await chat(task.messages)
        {body}
    """
    started = time.monotonic()
    (group,) = sample(tmp_path, source, ScriptedEngine(), group_size=2, timeout_s=2.0)
    assert [t.end for t in group.trajectories] == ["time", "time"]
    assert time.monotonic() - started < 45


class Restarting:
    """A server that fails at one of its requests and is down for 5 s then, as a watchdog restarts it."""

    name = "engine-0"

    def __init__(self, fails_at: int) -> None:
        self.fails_at, self.num_requests = fails_at, 0
        self.scripted = ScriptedEngine()
        self.engine: RetryingEngine = RetryingEngine(self)  # type: ignore[arg-type]
        self.restart: asyncio.Task[None] | None = None

    async def generate(
        self, model: str, prompt: EncodedPrompt, n: int, sampling: Sampling, version: int
    ) -> list[Call]:
        self.num_requests += 1
        if self.num_requests == self.fails_at:
            self.engine.pause()
            self.restart = asyncio.ensure_future(self._resume())
            raise EngineFailed("the connection is lost")
        return await self.scripted.generate(model, prompt, n, sampling, version)

    async def _resume(self) -> None:
        await asyncio.sleep(5.0)
        await self.engine.resume(self)  # type: ignore[arg-type]

    async def aclose(self) -> None: ...


def episode_with(client: Restarting, folder: Path, source: str) -> Any:
    async def run() -> Any:
        async with environment(folder, source, timeout_s=3.0) as running:
            engines: Any = client.engine
            (group,) = await running.sample([make_prompt()], make_request(engines))
            return group.trajectories[0]

    return asyncio.run(run())


@pytest.mark.parametrize("fails_at", [1, 2])
def test_the_wait_for_an_engine_that_restarts_does_not_count(tmp_path: Path, fails_at: int) -> None:
    """Neither against env.timeout_s, nor as a timeout of the chat."""
    client = Restarting(fails_at)
    trajectory = episode_with(client, tmp_path, THREE_TURNS)
    assert (trajectory.end, trajectory.reward, len(trajectory.calls)) == ("stop", 0.25, 3)
    assert client.num_requests == 4
    assert 4.5 < client.engine._lost_s < 8


def test_an_episode_that_hangs_ends_in_time_after_a_restart(tmp_path: Path) -> None:
    source = THREE_TURNS.replace("return 0.25", "import time; time.sleep(60)")
    started = time.monotonic()
    assert episode_with(Restarting(1), tmp_path, source).end == "time"
    assert time.monotonic() - started < 45


LEAVES_PROCESSES = """
    import asyncio, os, subprocess, time
    from pathlib import Path

    FOLDER = Path(r"{folder}")

    def note(name, pid):
        (FOLDER / "part").write_text(str(pid))
        (FOLDER / "part").rename(FOLDER / name)

    def leave():
        child = subprocess.Popen(["sleep", "300"], start_new_session=True)
        note("session.pid", child.pid)
        if os.fork() == 0:  # a daemon: its parent ends at once
            os.setsid()
            if os.fork() == 0:
                note("daemon.pid", os.getpid())
                os.execvp("sleep", ["sleep", "300"])
            os._exit(0)
        os.wait()
        while not (FOLDER / "daemon.pid").exists():
            time.sleep(0.05)

    def living():
        pids = [path.read_text() for path in FOLDER.glob("*.pid")]
        return pids if len(pids) < 2 else [pid for pid in pids if Path(f"/proc/{{pid}}").exists()]

    async def episode(task, chat):
        await chat(task.messages)
        if task.id == "p0":
            leave()
            {end}
        if task.id == "p1":  # until then p2 waits, so that it outlives the time limit of p0
            await asyncio.sleep(4)
            return 1.0
        deadline = time.monotonic() + 12
        while (len(list(FOLDER.glob("*.pid"))) < 2 or living()) and time.monotonic() < deadline:
            await asyncio.sleep(0.05)
        return float(len(list(FOLDER.glob("*.pid"))) == 2 and not living())
"""


@pytest.mark.parametrize("end", ["return 1.0", "os._exit(3)", "raise ValueError('bad')", "time.sleep(60)"])
def test_an_episode_leaves_no_process_while_another_runs(tmp_path: Path, end: str) -> None:
    """Not even a child in a session of its own, or a daemon. Episode p2 checks it."""
    source = LEAVES_PROCESSES.format(folder=tmp_path, end=end)
    limit_s = 8.0 if "sleep" in end else 60.0
    options: dict[str, Any] = {"on_error": "drop", "timeout_s": limit_s, "max_concurrent": 2}
    groups = sample(tmp_path, source, ScriptedEngine(), num_prompts=3, **options)
    assert {g.prompt.id: g.trajectories[0].reward for g in groups}["p2"] == 1.0


def test_what_the_file_started_at_its_import_stays(tmp_path: Path) -> None:
    source = """
    import subprocess
    SERVER = subprocess.Popen(["sleep", "300"])

    async def episode(task, chat):
        await chat(task.messages)
        return float(open(f"/proc/{SERVER.pid}/stat").read().rpartition(")")[2].split()[0] != "Z")
    """

    async def run() -> list[float]:
        async with environment(tmp_path, source) as running:
            found = []
            for step in (1, 2):
                groups = await running.sample([make_prompt()], make_request(ScriptedEngine(), step))
                found.append(groups[0].trajectories[0].reward)
            return found

    assert asyncio.run(run()) == [1.0, 1.0]
