"""A run that goes on with another placement: a real trainer that gets a second rank after step 2."""

from __future__ import annotations

from pathlib import Path

import pytest

from skylite.config.loading import read_run_config
from skylite.rollout.session import read_events
from skylite.run.run_dir import RunDir
from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S
from tests.torture.ground import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
LAUNCHER = """
import sys
sys.path.insert(0, {root!r})
from skylite.rollout.measured_placement import MeasuredPlacement
from tests.fakes.launcher import FakeLauncher

def step_ended(self, plan, metrics):
    return self.continue_with({{"trainer.num_ranks": 2}}, "a test moves it") if metrics["step"] == 2 else ""

MeasuredPlacement.step_ended = step_ended
"""


def test_a_run_continues_with_another_placement(project: Project) -> None:
    (project.root / "moving.py").write_text(LAUNCHER.format(root=str(Path(__file__).parents[2])))
    chosen = (*SETTINGS, "eval.limit=0", "engine.launcher=moving.py:FakeLauncher", "shared_network=true")
    settings = [word for setting in chosen for word in ("--set", setting)]
    settings += ["--set", "sync.rollout_mismatch=warn"]
    done = project.run(*project.train_args("moved", 4, *settings), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    run = RunDir(project.root / "moved")
    assert [m["step"] for m in project.metrics("moved")] == [1, 2, 3, 4]
    assert read_run_config(run.config_path).config.trainer.num_ranks == 2
    assert project.status("moved")["phase"] == "done"
    steps = [
        event.get("step", event["event"])
        for event in read_events(run.events_path)
        if event["event"] in ("run_started", "trainer_step_seen")
    ]
    assert steps == ["run_started", 1, 2, "run_started", 3, 4], "no step is trained twice"
