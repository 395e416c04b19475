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


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyResult:
    """A row of the table."""

    name: str
    settings: dict[str, Any]
    phase: str
    step: int
    held_out: MeanScore | None
    """The last held-out score; None: there is none."""


def policy_results(sweep: SweepDir) -> list[PolicyResult]:
    """All policies, the highest held-out score first; those without one last."""
    rows = []
    for name, settings in sweep.policies().items():
        run, score = sweep.run(name), None
        phase, step = "not started", 0
        if run.status_path.exists():
            status = read_status(run.status_path)
            phase, step = status.phase, status.step
            held_out = [h for h in read_facts(run.root).held_out if h.version > 0]
            score = held_out[-1].score if held_out else None
        rows.append(PolicyResult(name=name, settings=settings, phase=phase, step=step, held_out=score))
    return sorted(rows, key=lambda row: -row.held_out.mean if row.held_out else math.inf)


def best_of(rows: Sequence[PolicyResult]) -> str:
    """Which policy is the best, if its interval lies above those of all others; else that none is."""
    scored = [(row, row.held_out) for row in rows if row.held_out is not None]
    if len(scored) < 2:
        return "fewer than two policies have a held-out score, so none is the best"
    (first, top), *others = scored
    if math.isfinite(top.low) and all(top.low > score.high for _, score in others):
        return f"best: {first.name}; its 95 % interval lies above those of the others"
    return "no policy is the best: the 95 % intervals of the highest scores overlap"


def table_text(sweep: SweepDir) -> str:
    """The table and its verdict, for a terminal."""
    rows = policy_results(sweep)
    if not rows:
        raise ConfigError(f"{sweep.root} has no policies.", "Start a new sweep.")
    width = max(len(row.name) for row in rows)
    lines = [
        f"{row.name:<{width}}  {row.phase:<11} step {row.step:<5} "
        f"{'-' if row.held_out is None else f'{row.held_out.name} {row.held_out}'}"
        for row in rows
    ]
    return "\n".join([*lines, best_of(rows)])
