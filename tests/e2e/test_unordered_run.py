"""A real trainer on groups that steps take as they finish: killed, resumed, replayed."""

from __future__ import annotations

import signal

import pyarrow.parquet as pq
import pytest

from skylite.run.rollout_file import read_batches
from skylite.run.run_dir import RunDir
from tests.e2e.project import Project, descendants
from tests.e2e.running import DEADLINE_S, running, wait_for_step, wait_gone
from tests.torture.ground import SETTINGS

pytestmark = [pytest.mark.e2e, pytest.mark.dist]


def test_a_killed_run_goes_on_with_each_prompt_once(project: Project, fake_engine: None) -> None:
    chosen = (*SETTINGS, "eval.limit=0", "rollout.prompts_per_step=2", "rollout.max_staleness=3")
    settings = [word for setting in chosen for word in ("--set", setting)]
    with running(project, *project.train_args("unordered", 8, *settings)) as process:
        wait_for_step(project, process, "unordered", 3)
        children = descendants(process.pid)
        process.send_signal(signal.SIGKILL)
        process.wait()
    assert wait_gone(children) == []
    resumed = project.run("train", "--resume", "unordered", timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr

    run = RunDir(project.root / "unordered")
    batches = [place for step in range(1, 9) for place in read_batches(run.rollout_path(step), step)]
    assert len(set(batches)) == len(batches) == 16
    assert sorted(number for number, _ in batches) == [number for k in range(1, 9) for number in (k, k)]
    for step in range(1, 9):
        versions = pq.read_table(run.rollout_path(step))["adapter_version"].to_pylist()
        assert step - 4 <= min(versions) <= max(versions) <= step - 1
    metrics = project.metrics("unordered")
    assert [m["step"] for m in metrics] == list(range(1, 9))
    assert max(m["staleness/max"] for m in metrics) > 1, "it sampled ahead"

    replayed = project.run("replay", "unordered", "--step", "8", timeout_s=DEADLINE_S)
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.startswith("equal: step 8 again from ")
