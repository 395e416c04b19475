"""Runs that must stay equal to the last bit while the code changes.

    python -m tests.guard.guard record FOLDER           # before the change: five steps of each kind
    python -m tests.guard.guard replay FOLDER           # after each commit: the last step again
    python -m tests.guard.guard compare FOLDER [KIND ..]  # at the end: all runs again

FOLDER belongs to one machine: other processors round differently, so no result is kept in git.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.e2e.conftest import EXACT
from tests.e2e.project import Project, make_project
from tests.tiny_models import make_tiny_model

STEPS = 5
KEPT = ("sync.keep_last=100", "checkpoint.every=1", "checkpoint.keep_last=100")
AGENT = Path(__file__).parents[2] / "examples" / "agent" / "agent.py"
WARM = "grpo"
"""The kind whose adapter the warm start takes."""
KINDS: dict[str, tuple[str, ...]] = {
    "grpo": (),
    "ppo": ("algorithm.name=ppo",),
    "gspo": ("algorithm.name=gspo", "algorithm.updates_per_step=2"),
    "kl-in-reward": ("algorithm.kl_coef=0.05", "algorithm.kl_in=reward", "algorithm.advantage=reinforce++"),
    "clip-cov": ("algorithm.name=clip_cov", "algorithm.cov_frac=0.1"),
    "resampling": ("algorithm.name=dapo",),
    "warm-start": ("algorithm.kl_coef=0.01",),
    "two-ranks": ("trainer.num_ranks=2",),
    "multi-turn": ("env.max_tokens=400", "rollout.prompts_per_step=2"),
}
"""Name -> settings."""
NOT_COMPARED = ("time/", "mem/", "seconds", "perf/", "sync/publish_and_load_frac")
"""Beginnings of metrics that no two runs share."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("what", choices=["record", "replay", "compare"])
    parser.add_argument("folder", type=Path)
    parser.add_argument("kinds", nargs="*", choices=[*KINDS, []])
    args = parser.parse_args()
    folder, kinds = args.folder.resolve(), args.kinds or list(KINDS)
    if args.what == "record":
        folder.mkdir(parents=True)
        project = make_project(folder, make_tiny_model(folder / "model"))
        problems = [problem for kind in kinds for problem in train(project, kind, kind)]
    else:
        project = Project(folder, folder / "model")
        act = replay if args.what == "replay" else compare
        problems = [problem for kind in kinds for problem in act(project, kind)]
    print("\n".join(problems) or f"equal: {', '.join(kinds)}")
    sys.exit(bool(problems))


def train(project: Project, kind: str, run: str) -> Iterator[str]:
    """Train a run of the kind. Yields why it failed."""
    extra = [word for setting in (*EXACT, *KEPT, *KINDS[kind]) for word in ("--set", setting)]
    if kind == "warm-start":
        extra += ["--from-adapter", str(project.root / WARM / "adapters" / f"policy-v{STEPS:06d}")]
    if kind == "multi-turn":
        extra += ["--env", f"command:{sys.executable} {AGENT}", "--group-size", "2"]
    done = project.run(*project.train_args(run, STEPS, *extra), timeout_s=1200)
    if done.returncode != 0:
        yield f"{kind}: train ended with exit code {done.returncode}: {done.stderr[-2000:]}"


def replay(project: Project, kind: str) -> Iterator[str]:
    """Train the recorded run's last step again. Yields the difference."""
    done = project.run("replay", kind, "--step", str(STEPS), timeout_s=600)
    if done.returncode != 0:
        yield f"{kind}: {done.stdout}{done.stderr[-2000:]}"


def compare(project: Project, kind: str) -> Iterator[str]:
    """Train a run of the kind again. Yields what differs from the recorded one."""
    again = f"{kind}-again"
    shutil.rmtree(project.root / again, ignore_errors=True)
    yield from train(project, kind, again)
    for version in range(STEPS + 1):
        name = f"adapters/policy-v{version:06d}/adapter_model.safetensors"
        files = [project.root / run / name for run in (kind, again)]
        if not files[1].exists() or files[0].read_bytes() != files[1].read_bytes():
            yield f"{kind}: version {version} differs"
    for before, after in zip(project.metrics(kind), project.metrics(again), strict=False):
        one, two = compared(before), compared(after)
        yield from (
            f"{kind}: step {before['step']}: {name} was {one.get(name)}, is {two.get(name)}"
            for name in sorted(one.keys() & two.keys())
            if one[name] != two[name]
        )


def compared(metrics: dict[str, Any]) -> dict[str, Any]:
    """Metrics that two equal runs share. NaN as text, which equals itself."""
    return {n: json.dumps(v) for n, v in metrics.items() if not n.startswith(NOT_COMPARED)}


if __name__ == "__main__":
    main()
