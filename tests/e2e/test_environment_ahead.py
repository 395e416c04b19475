"""Episodes of several turns, sampled one step ahead: every call of a trajectory has one version.

`eval` plays what the run played.
"""

from __future__ import annotations

import json

import pytest

from skylite.report.completions import read_held_out
from skylite.rollout.session import read_events
from skylite.run.rollout_file import read_rollouts
from skylite.run.run_dir import RunDir
from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S
from tests.torture.ground import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
EPISODE = """
async def episode(task, chat):
    messages, letters = list(task.messages), 0
    for turn in range(3):
        reply = await chat(messages)
        letters += sum(c.isascii() and c.isalpha() for c in reply.text)
        messages += [reply.message, {"role": "user", "content": f"again {turn}"}]
    return letters / 36
"""


def test_episodes_are_played_while_the_step_before_is_trained(project: Project, fake_engine: None) -> None:
    (project.root / "ahead.py").write_text(EPISODE)
    chosen = (*SETTINGS, "eval.limit=2", "env.max_tokens=400", "rollout.prompts_per_step=2")
    settings = [word for setting in (*chosen, "rollout.max_staleness=1") for word in ("--set", setting)]
    args = project.train_args("episodes-ahead", 3, "--env", "ahead.py:episode", *settings)
    done = project.run(*args, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    resumed = project.run("train", "--resume", "episodes-ahead", "--steps", "5", timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr

    run = RunDir(project.root / "episodes-ahead")
    for step, version in enumerate([0, 0, 1, 2, 3], 1):
        groups = read_rollouts(run.rollout_path(step))
        assert [len(g.trajectories) for g in groups] == [4] * 2
        for trajectory in (t for g in groups for t in g.trajectories):
            assert len(trajectory.calls) == 3
            assert {s.adapter_version for s in trajectory.calls} == {version}, f"step {step}"
    assert [m["staleness/max"] for m in project.metrics("episodes-ahead")] == [0, 1, 1, 1, 1]
    order = [(e["event"], e["step"]) for e in read_events(run.events_path) if "step" in e]
    for step in (2, 3, 5):  # 4 is the first step of the resumed run
        assert order.index(("sampling_started", step)) < order.index(("trainer_step_seen", step - 1))

    words = ["eval", "episodes-ahead", "--steps", "0,5", "--limit", "2", "--json"]
    evaluated = project.run(*words, timeout_s=DEADLINE_S)
    assert evaluated.returncode == 0, evaluated.stderr
    evals = run.root / "evals"
    for label, version in (("before", 0), ("after", 5)):
        during = read_held_out(evals / f"{label}-v{version:06d}.parquet", version)
        alone = read_held_out(evals / f"policy-v{version:06d}-data-test-greedy.parquet", version)
        assert [c.turns for c in alone] == [c.turns for c in during]
        assert [(len(c.turns), c.reward) for c in alone] == [(3, c.reward) for c in during]
    accuracies = [r["mean"] for r in json.loads(evaluated.stdout)["results"]]
    assert len(accuracies) == 2, "one for each version"
    assert accuracies[0] != accuracies[1], "two adapters"
