"""The result of a sweep: its policies by held-out score, and whether one is the best."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from skylite.errors import ConfigError
from skylite.evaluation.confidence_interval import MeanScore
from skylite.report.read_run import read_facts
from skylite.run.status import read_status
from skylite.run.sweep_dir import SweepDir

PROBLEMS = ("data", "env", "eval", "reward")
"""Sections of settings that say what a held-out score measures."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """A row of the table."""

    name: str
    settings: dict[str, Any]
    phase: str
    step: int
    held_out: MeanScore | None
    """The last held-out score; None: there is none."""
    version: int = 0
    """The adapter that has it, which is the number of steps it was trained."""
    why: str = ""
    """Why it left before its last step."""


def policy_results(sweep: SweepDir) -> list[PolicyResult]:
    """All policies: those that were scored last first, of these the highest score; those without one last."""
    rows = []
    for name, settings in sweep.policies().items():
        run, score, version = sweep.run(name), None, 0
        phase, step = "not started", 0
        if run.status_path.exists():
            status = read_status(run.status_path)
            phase, step = status.phase, status.step
            held_out = [h for h in read_facts(run.root).held_out if h.version > 0]
            if held_out:
                score, version = held_out[-1].score, held_out[-1].version
        why = sweep.why_left(name)
        rows.append(
            PolicyResult(
                name=name,
                settings=settings,
                phase="left" if why and phase == "stopped" else phase,
                step=step,
                held_out=score,
                version=version,
                why=why,
            )
        )
    return sorted(rows, key=lambda row: (-row.version, -row.held_out.mean if row.held_out else math.inf))


def best_of(rows: Sequence[PolicyResult]) -> str:
    """Which policy is the best, if its interval lies above those of all others; else why none is.

    Only scores after the same steps, on the same problems, are compared: those of the policies that trained
    longest.
    """
    varied = {key.partition(".")[0] for row in rows for key in row.settings}
    if differing := varied & {*PROBLEMS}:
        return f"no policy is called the best: their scores measure different things ({', '.join(differing)})"
    scored = [(row, row.held_out) for row in rows if row.held_out is not None]
    if len(scored) < 2:
        return "fewer than two policies have a held-out score, so none is the best"
    (first, top), *others = [pair for pair in scored if pair[0].version == scored[0][0].version]
    earlier = len(scored) - len(others) - 1
    left = f" ({earlier} with a last score before step {first.version} are not compared)" if earlier else ""
    if not others:
        return f"no policy is called the best: only {first.name} has a score of step {first.version}{left}"
    if math.isfinite(top.low) and all(top.low > score.high for _, score in others):
        return f"best: {first.name}; its 95 % interval lies above those of the others{left}"
    return f"no policy is the best: the 95 % intervals of the highest scores overlap{left}"


def table_text(sweep: SweepDir) -> str:
    """The table and its verdict, for a terminal."""
    rows = policy_results(sweep)
    if not rows:
        raise ConfigError(f"{sweep.root} has no policies.", "Start a new sweep.")
    width = max(len(row.name) for row in rows)
    lines = [
        f"{row.name:<{width}}  {row.phase:<11} step {row.step:<5} "
        f"{'-' if row.held_out is None else f'{row.held_out.name} {row.held_out}'}"
        f"{f'; {row.why}' if row.why else ''}"
        for row in rows
    ]
    return "\n".join([*lines, best_of(rows)])
