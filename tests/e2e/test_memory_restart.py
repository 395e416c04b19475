"""Two ranks run out of memory in a real run: it resumes by itself with smaller micro-batches on both."""

from __future__ import annotations

import pytest

from skylite.config.loading import read_run_config
from skylite.run.run_dir import RunDir
from tests.e2e.project import Project

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
HUNGRY = """
import os
from pathlib import Path
import torch
from skylite.algorithms.losses import POLICY_LOSSES

def loss(x, config):
    run = Path({run!r})
    with (run / f"sizes-{{os.environ['RANK']}}").open("a") as file:
        file.write(f"{{x.num_segments}}\\n")
    if x.num_segments > 4 and (run / "checkpoints" / "step-000001").exists():
        torch.empty(1 << 60)  # more than any machine has
    return POLICY_LOSSES["clip"](x, config)
"""
"""A policy loss that runs out of memory, from step 2 on, in a micro-batch of more than four completions."""


@pytest.mark.usefixtures("fake_engine")
def test_two_ranks_that_run_out_of_memory_resume_without_max_restarts(project: Project) -> None:
    """As docs/how-to/gpus.md promises. The trainer's choices are shown at both starts, and recorded."""
    run = RunDir(project.root / "hungry")
    (project.root / "hungry.py").write_text(HUNGRY.format(run=str(run.root)))
    settings = (
        "algorithm.policy_loss=hungry.py:loss",
        "trainer.num_ranks=2",
        "trainer.tokens_per_micro_batch=128",
        "rollout.max_completion_tokens=2",
        "checkpoint.every=1",
        "eval.limit=0",
    )
    done = project.run(*project.train_args("hungry", 3, *(w for s in settings for w in ("--set", s))))
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("It is computed again with trainer.tokens_per_micro_batch=64.") == 1
    assert done.stderr.count("The run resumes from its last checkpoint.") == 1, "with no count of restarts"
    assert "\nfailed\n" not in done.stderr, "the run shows no end before it resumes"
    assert f"resuming {run.root} after step 1 of 3\n" in done.stderr
    assert [(m["step"], m["restarts"]) for m in project.metrics("hungry")] == [(1, 0), (2, 0), (3, 0)]
    assert [run.read_json(run.trainer_step_path(k))["tokens_per_micro_batch"] for k in (2, 3)] == [64, 64]
    for rank in range(2):
        sizes = [int(size) for size in (run.root / f"sizes-{rank}").read_text().split()]
        assert sizes[:2] == [8, 8], (
            f"rank {rank}: two groups in one micro-batch, in step 1 and before the failure"
        )
        assert set(sizes[2:]) == {4}, f"rank {rank}: one group in each micro-batch of steps 2 and 3"

    choices = read_run_config(run.config_path).resolved.choices
    assert any(choice.startswith("packing: tree; ") for choice in choices)
    assert all(choice.partition(";")[0] in done.stderr for choice in choices)
    assert done.stderr.count("packing: tree") == 2, "both starts show it"
