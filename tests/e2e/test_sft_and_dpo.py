"""`skylite train` learns from prepared chats and pairs: no engine, the loss falls, a resume is bit-equal."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skylite import load_run
from skylite.adapters.manifest import read_manifest
from skylite.run.metrics_file import read_metrics
from tests.e2e.project import Project
from tests.e2e.running import DEADLINE_S

CHATS = [
    {"messages": [
        {"role": "user", "content": f"{n} plus {n}?"}, {"role": "assistant", "content": f"It is {2 * n}."},
        {"role": "user", "content": "Sure?"}, {"role": "assistant", "content": "Yes."},
    ]}
    for n in range(14)
]  # fmt: skip
PAIRS = [{"prompt": f"{n} plus {n}?", "chosen": f"It is {2 * n}.", "rejected": "No."} for n in range(14)]
STEPS = 4
EXACT = ("trainer.deterministic=true", "checkpoint.every=2", "rollout.prompts_per_step=4", "eval.limit=2")


def weights(project: Project, run: str) -> str:
    return read_manifest(project.root / run / "adapters" / f"policy-v{STEPS:06d}").weights_sha256


@pytest.mark.parametrize(("algorithm", "kind", "rows"), [("sft", "sft", CHATS), ("dpo", "pairs", PAIRS)])
def test_a_run_without_an_engine_learns_and_resumes(
    project: Project, algorithm: str, kind: str, rows: list[object]
) -> None:
    path = project.root / f"{algorithm}.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    done = project.run("prepare", path.name, f"--{kind}", "--out", f"data-{algorithm}")
    assert done.returncode == 0, done.stderr
    settings = [word for setting in (f"algorithm.name={algorithm}", *EXACT) for word in ("--set", setting)]
    args = ["train", "--model", str(project.model), "--data", f"data-{algorithm}", "--lr", "1e-2"]
    args += ["--steps", str(STEPS), "--run", algorithm, *settings]
    done = project.run(*args, timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    run = project.root / algorithm
    losses = [m["loss/policy"] for m in read_metrics(run / "metrics.jsonl")]
    assert losses == sorted(losses, reverse=True)
    assert losses[-1] < 0.8 * losses[0]
    assert not list(Path(run, "logs").glob("vllm*"))
    scores = load_run(run).held_out
    assert sorted(scores) == [0, STEPS]
    before = weights(project, algorithm)
    done = project.run("train", "--resume", algorithm, "--at", "2", timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert weights(project, algorithm) == before
    assert [m["loss/policy"] for m in read_metrics(run / "metrics.jsonl")] == losses
    assert load_run(run).held_out == scores
    done = project.run("train", "--resume", algorithm)
    assert (done.returncode, "is at step 4 of 4 already" in done.stderr) == (2, True)
