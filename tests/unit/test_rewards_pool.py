from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from skylite.errors import ChildDied, RunFailed
from skylite.rewards.worker_pool import RewardPool
from skylite.types import Score
from tests.unit.data_cases import prompt

PLUG_IN = """
import os, time
def reward(prompt, completion):
    if completion == "raise": raise LookupError("odd one")
    if completion == "die": os.kill(os.getpid(), 9)
    if completion == "hang": time.sleep(600)
    return float(os.getpid()) if completion == "pid" else float(completion)
"""


@pytest.fixture
def spec(tmp_path: Path) -> str:
    (tmp_path / "mine.py").write_text(PLUG_IN, encoding="utf-8")
    return f"{tmp_path / 'mine.py'}:reward"


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def rewards_of(scores: list[Score]) -> list[float]:
    return [score.reward for score in scores]


def semaphores_of(pid: int) -> list[Path]:
    """Files of shared memory: a process maps them under the name that they had before they were linked."""
    maps = Path(f"/proc/{pid}/maps").read_text(encoding="utf-8").splitlines()
    inodes = {int(line.split()[4]) for line in maps if "/dev/shm/sem." in line}
    return [file for file in Path("/dev/shm").glob("sem.mp-*") if file.stat().st_ino in inodes]


def wait_until_dead(pid: int) -> None:
    deadline = time.monotonic() + 20
    while alive(pid):
        assert time.monotonic() < deadline, f"process {pid} is still there"
        time.sleep(0.05)


def test_scores_are_in_order_and_an_exception_names_its_prompt(spec: str) -> None:
    pool = RewardPool([spec], num_workers=2)
    try:
        items = [(prompt(id=f"t/{i}"), str(i)) for i in range(40)]
        assert rewards_of(asyncio.run(pool.score(items))) == [float(i) for i in range(40)]
        with pytest.raises(RunFailed, match=r"LookupError: odd one .prompt t/bad"):
            asyncio.run(pool.score([(prompt(id="t/good"), "1"), (prompt(id="t/bad"), "raise")]))
        assert rewards_of(asyncio.run(pool.score(items[:2]))) == [0.0, 1.0]
        assert list(
            map(str, rewards_of(asyncio.run(pool.score([(prompt(), "nan"), (prompt(), "-inf")]))))
        ) == [
            "nan",
            "-inf",
        ]
    finally:
        pool.close()


def test_a_dead_worker_is_an_error_and_not_a_score(spec: str) -> None:
    pool = RewardPool([spec])
    try:
        with pytest.raises(ChildDied, match="reward worker ended"):
            asyncio.run(pool.score([(prompt(), "die")]))
    finally:
        pool.close()


def test_the_death_of_an_idle_worker_is_reported_at_once(spec: str) -> None:
    async def lose_one() -> list[ChildDied]:
        deaths: list[ChildDied] = []
        pool = RewardPool([spec], num_workers=2)
        try:
            pid = int((await pool.score([(prompt(), "pid")]))[0].reward)
            pool.watch(deaths.append)
            await asyncio.sleep(0.2)
            assert deaths == []
            os.kill(pid, signal.SIGKILL)
            deadline = time.monotonic() + 10
            while not deaths and time.monotonic() < deadline:
                await asyncio.sleep(0.02)
            await asyncio.sleep(0.3)
            return deaths
        finally:
            pool.close()

    deaths = asyncio.run(lose_one())
    assert 1 <= len(deaths) <= 2  # once per worker: the executor ends the others when one dies
    assert "reward worker ended" in deaths[0].what


def test_close_reports_no_death(spec: str) -> None:
    async def open_and_close() -> list[ChildDied]:
        deaths: list[ChildDied] = []
        pool = RewardPool([spec], num_workers=2)
        await pool.score([(prompt(), "1")])
        pool.watch(deaths.append)
        pool.close()
        await asyncio.sleep(0.2)
        return deaths

    assert asyncio.run(open_and_close()) == []


def test_close_ends_a_hanging_worker(spec: str) -> None:
    pool = RewardPool([spec])
    pid = int(asyncio.run(pool.score([(prompt(), "pid")]))[0].reward)

    async def hang() -> None:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(pool.score([(prompt(), "hang")]), timeout=0.5)

    asyncio.run(hang())
    os.kill(pid, signal.SIGINT)  # Ctrl-C reaches every process of the group; workers leave it to the parent
    assert alive(pid)
    started = time.monotonic()
    pool.close()
    assert time.monotonic() - started < 5
    assert not alive(pid)


def test_a_stopped_worker_fails_the_run_in_time_and_is_named(spec: str) -> None:
    async def score_by_a_stopped_one() -> int:
        pool = RewardPool([spec], timeout_s=5)
        try:
            pid = int((await pool.score([(prompt(), "pid")]))[0].reward)
            os.kill(pid, signal.SIGSTOP)
            with pytest.raises(
                RunFailed, match=r"longer than 5 s .reward.timeout_s.; prompt t/late is not scored"
            ) as error:
                await pool.score([(prompt(id="t/late"), "1")])
            assert str(pid) in error.value.hint
            return pid
        finally:
            pool.close()

    assert not alive(asyncio.run(score_by_a_stopped_one()))


PARENT = """
import asyncio, sys, time
from skylite.rewards.worker_pool import RewardPool
from skylite.types import Prompt
if __name__ == "__main__":
    pool = RewardPool([sys.argv[1]])
    asked = Prompt(id="t", messages=[], answer="", source="")
    print(int(asyncio.run(pool.score([(asked, "pid")]))[0].reward), flush=True)
    time.sleep(600)
"""


def test_a_killed_process_group_leaves_no_worker_and_no_semaphore(spec: str, tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT, encoding="utf-8")
    command = [sys.executable, str(script), spec]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as parent:
        assert parent.stdout is not None
        pid = int(parent.stdout.readline())
        assert alive(pid)
        semaphores = semaphores_of(parent.pid)
        os.killpg(parent.pid, signal.SIGKILL)
        parent.wait()
    wait_until_dead(pid)
    assert semaphores
    deadline = time.monotonic() + 20
    while left := [file for file in semaphores if file.exists()]:
        assert time.monotonic() < deadline, f"{left} are still there"
        time.sleep(0.05)
