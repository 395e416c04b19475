"""A NaN reward in a real run: the step trains nothing and is kept on disk. The run stops or skips it, as
configured.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skylite.data.prompt_order import prompts_for_step
from skylite.data.prompts import read_prompts
from skylite.run.run_dir import RunDir, adapter_name
from tests.e2e.project import Project

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
REWARD = """
def score(completion, id):
    return float("nan") if id == {bad!r} else len(completion) / 12
"""


def weights(run: RunDir, version: int) -> bytes:
    return (run.default_adapters / adapter_name(version) / "adapter_model.safetensors").read_bytes()


@pytest.mark.usefixtures("fake_engine")
def test_a_run_stops_at_a_nan_reward_and_continues_without_the_step(project: Project) -> None:
    prompts, _ = read_prompts(project.root / "data" / "train.parquet")
    bad = prompts_for_step(prompts, 2, 4, 0)[1].id
    (project.root / "none.py").write_text(REWARD.format(bad=bad))
    settings = (
        'reward.functions=["none.py:score"]',
        "eval.limit=0",
        "trainer.deterministic=true",
        "sync.keep_last=9",
    )
    run = RunDir(Path(project.root / "none"))
    stopped = project.run(
        *project.train_args("none", 3, "--seed", "0", *(word for s in settings for word in ("--set", s)))
    )
    assert stopped.returncode == 1, stopped.stderr
    assert (
        f"Step 2 went bad: the reward of trajectory 0 of group 1 (prompt {bad}) is nan. "
        "The update was not applied" in stopped.stderr
    )
    assert "Traceback" not in stopped.stderr
    assert (run.rejected_steps / "step-000002" / "rollouts.parquet").read_bytes() == run.rollout_path(
        2
    ).read_bytes()

    finished = project.run("train", "--resume", "none", "--set", "anomaly.action=skip")
    assert finished.returncode == 0, finished.stderr
    lines = [
        json.loads(line, parse_constant=pytest.fail) for line in run.metrics_path.read_text().splitlines()
    ]
    assert [m["reward/mean"] is None for m in lines] == [False, True, False]
    assert f"prompt {bad}" in lines[1]["anomaly/reason"]
    assert sorted(p.name for p in run.rejected_steps.iterdir()) == ["step-000002", "step-000002-2"]
    assert weights(run, 1) == weights(run, 2) != weights(run, 3)

    replayed = project.run("replay", "none", "--step", "2")
    assert (replayed.returncode, replayed.stdout[:6]) == (0, "equal:"), replayed.stdout + replayed.stderr
