"""Sampling one step ahead with real vLLM: two versions are loaded, and a resume keeps the versions."""

from __future__ import annotations

import pyarrow.parquet as pq
import pytest

from skylite.run.events import read_events
from skylite.run.run_dir import RunDir
from tests.e2e.project import Project

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]


def test_a_step_is_sampled_while_the_one_before_is_trained_and_resume_keeps_the_versions(
    project: Project, request: pytest.FixtureRequest
) -> None:
    """The steps after the resume sample from the fake engine: only their versions count."""
    settings = ("--set", "rollout.max_staleness=1", "--set", "eval.limit=0")
    done = project.run(*project.train_args("ahead", 3, *settings))
    assert done.returncode == 0, done.stderr
    request.getfixturevalue("fake_engine")
    resumed = project.run("train", "--resume", "ahead", "--steps", "5")
    assert resumed.returncode == 0, resumed.stderr
    run = RunDir(project.root / "ahead")
    versions = [
        set(pq.read_table(run.rollout_path(step))["adapter_version"].to_pylist()) for step in range(1, 6)
    ]
    assert versions == [{0}, {0}, {1}, {2}, {3}]
    metrics = project.metrics("ahead")
    assert [m["staleness/max"] for m in metrics] == [0, 1, 1, 1, 1]
    assert all(m["canary/gap_max"] < 0.002 for m in metrics)
    # Step 3's completions are stale: their logprobs must differ from the trainer's.
    assert metrics[0]["mismatch/logprob_diff_mean"] < 1e-3 < metrics[2]["mismatch/logprob_diff_mean"]
    order = [
        (e["event"], e["step"])
        for e in read_events(run.events_path)
        if e["event"] in ("sampling_started", "trainer_step_seen")
    ]
    assert order.index(("sampling_started", 2)) < order.index(("trainer_step_seen", 1))
