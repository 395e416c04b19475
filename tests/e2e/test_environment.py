"""A run on episodes of several turns with real vLLM. test_environment_ahead.py evaluates such a run."""

from __future__ import annotations

import json
import sys

import pytest

from skylite.run.rollout_file import read_rollouts
from tests.e2e.conftest import EXACT
from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S
from tests.unit.doc_blocks import ROOT

pytestmark = [pytest.mark.e2e, pytest.mark.vllm, pytest.mark.dist]
AGENT = ROOT / "examples" / "agent" / "agent.py"


def test_an_unchanged_openai_program_trains_and_replays(project: Project) -> None:
    """Three calls a trajectory. Trainer and vLLM agree on the probability of each sampled token."""
    command = f"command:{sys.executable} {AGENT}"
    chosen = (*EXACT, "env.max_tokens=400")
    settings = [word for setting in chosen for word in ("--set", setting)]
    few = ["--set", "rollout.prompts_per_step=2", "--group-size", "2"]
    args = project.train_args("agent", 2, "--env", command, *settings, *few)
    done = project.run(*args, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr

    metrics = project.metrics("agent")
    assert [m["turns/mean"] for m in metrics] == [3.0] * 2
    assert all(m["turns/reused_frac"] > 0.5 and m["turns/branches_mean"] == 0 for m in metrics)
    assert all(m["turns/rerendered_tokens"] == 0 for m in metrics)
    assert all(m["mismatch/logprob_diff_mean"] < 1e-4 for m in metrics)
    assert all(m["canary/gap_max"] < 2e-3 for m in metrics)
    for step in (1, 2):
        groups = read_rollouts(project.root / "agent" / "rollouts" / f"step-{step:06d}.parquet")
        assert [len(g.trajectories) for g in groups] == [2] * 2
        for trajectory in (t for g in groups for t in g.trajectories):
            assert (len(trajectory.calls), trajectory.end) == (3, "stop")
            assert list(trajectory.components) == ["letters", "right"]
            for before, after in zip(trajectory.calls, trajectory.calls[1:], strict=False):
                known = before.prompt_token_ids + before.completion_token_ids
                assert after.prompt_token_ids[: len(known)] == known
            assert {s.adapter_version for s in trajectory.calls} == {step - 1}
            assert [s.observed for s in trajectory.calls[1:]] == ["user: Are you sure?"] * 2

    replayed = project.run("replay", "agent", "--step", "2", "--json", timeout_s=DEADLINE_S)
    assert replayed.returncode == 0, replayed.stderr
    said = json.loads(replayed.stdout)
    assert (said["equal"], said["step"], said["differences"]) == (True, 2, {})
    assert said["num_tensors"] > 0
