"""Episodes that misbehave: nothing of another trajectory is seen or lost, and the run goes as configured."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

import pytest

from tests.faults.episode_run import (
    FAILING,
    HANGING,
    choose,
    living_processes,
    reasons_of_stops,
    run_faults,
    wrong,
)
from tests.faults.episodes import FAULTS, HOURS_S
from tests.unit.environment_cases import ScriptedEngine, sample

LEAVES_A_ZOMBIE = """
    import asyncio, os
    from pathlib import Path

    def zombies():
        host = os.getppid()
        pids = Path(f"/proc/{host}/task/{host}/children").read_text().split()
        stats = [Path(f"/proc/{pid}/stat").read_text() for pid in pids]
        return sum(stat.rpartition(")")[2].split()[0] == "Z" for stat in stats)

    async def episode(task, chat):
        await chat(task.messages)
        if task.id == "p0":
            if os.fork() == 0:  # subprocess would wait for its child
                os.setsid()
                os._exit(0)
            await asyncio.sleep(0.3)
            return 1.0
        for _ in range(8):
            await asyncio.sleep(0.25)
        return float(zombies())
"""


def test_a_mix_of_faults_harms_no_other_trajectory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Hanging episodes are in test_episodes.py."""
    faults = choose(40, seed=1, without=HANGING)
    found = asyncio.run(run_faults(tmp_path, faults, monkeypatch))
    assert wrong(found) == []
    assert {a["fault"] for a in found.answers} >= {"malformed", "image", "flood", "use_other_keys"}
    assert len(found.trajectories) == sum(fault not in FAILING for fault in faults)
    deadline = time.monotonic() + 10
    while living_processes(f"sleep\0{HOURS_S}") and time.monotonic() < deadline:
        time.sleep(0.1)
    assert living_processes(f"sleep\0{HOURS_S}") == []


def test_a_fault_stops_the_run_with_its_prompt_if_the_settings_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    reasons = asyncio.run(reasons_of_stops(tmp_path, monkeypatch))
    assert reasons.keys() == FAILING.keys() < FAULTS.keys()
    for number, (fault, reason) in enumerate(reasons.items()):
        assert f"The episode of prompt p{number}, trajectory 0" in reason
        assert FAILING[fault] in reason, reason
        assert reason.isprintable()


def test_ended_processes_of_an_episode_are_reaped_while_another_runs(tmp_path: Path) -> None:
    first, second = sample(tmp_path, LEAVES_A_ZOMBIE, ScriptedEngine(), num_prompts=2)
    assert first.trajectories[0].reward == 1.0
    assert second.trajectories[0].reward == 0.0
