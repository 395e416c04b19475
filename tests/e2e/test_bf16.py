"""The loop in bfloat16 on a CPU, with real vLLM: canary, resume and replay."""

from __future__ import annotations

import math

import pytest

from skylite.adapters.manifest import SEQUENCES_PER_VERSION, read_manifest
from tests.e2e.project import FAKE_WORDS, Project
from tests.e2e.running import DEADLINE_S

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]


def test_a_bfloat16_run_verifies_every_version_resumes_and_replays(
    project: Project, request: pytest.FixtureRequest
) -> None:
    """The step after the resume samples from the fake engine."""
    settings = ("model.dtype=bfloat16", "eval.limit=0", "checkpoint.every=1", "trainer.deterministic=true")
    extra = [word for setting in settings for word in ("--set", setting)]
    done = project.run(*project.train_args("bf16", 2, *extra), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    for line in project.metrics("bf16"):
        assert abs(line["canary/projection"] - 1) < 0.65 + 4 * line["canary/projection_error"]
        assert 0 < line["canary/rounding"] < 1
        assert math.isfinite(line["loss/policy"])
    words = ("--steps", "3", *FAKE_WORDS)
    resumed = project.run("train", "--resume", "bf16", *words, timeout_s=DEADLINE_S)
    assert resumed.returncode == 0, resumed.stderr
    assert [m["step"] for m in project.metrics("bf16")] == [1, 2, 3]
    newest = read_manifest(project.root / "bf16" / "adapters" / "policy-v000003")
    assert newest.dtype == "bfloat16"
    assert len(newest.canary.sequences) == SEQUENCES_PER_VERSION

    replayed = project.run("replay", "bf16", "--step", "2")
    assert replayed.returncode == 0, replayed.stderr
    assert replayed.stdout.startswith("equal: step 2 again from "), replayed.stdout
