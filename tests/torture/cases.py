"""The cases of the torture test: which process gets which signal when, and the result of each."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Any

from tests.torture.moments import PHASES

KINDS = ("parent", "reaper-trainer", "reaper-engine", "agent", "rank-0", "engine", "reward-worker")
SIGNALS = ("KILL", "STOP")


@dataclass(frozen=True, slots=True)
class Case:
    """Who gets which signal when."""

    kind: str
    """One of KINDS, or "any": a random one of them."""
    phase: str
    """One of PHASES, or "random"."""
    signal: str
    """KILL. STOP: continued after STOP_HELD_S. STOP+KILL: stopped, then the parent is killed. HANG."""
    number: int = 0
    """Number of a random moment."""
    after_s: float = 0.0
    """For "random": seconds from the start or the resume."""


HANGS = (
    *(Case("engine", phase, "HANG") for phase in ("sampling", "publish", "load")),
    Case("reward-worker", "scoring", "HANG"),
    *(Case("rank-0", phase, "HANG") for phase in ("train", "publish", "checkpoint")),
    *(Case(kind, "train", "HANG") for kind in ("agent", "reaper-trainer", "reaper-engine")),
)
"""Never continued: engine.stall_timeout_s, reward.timeout_s and trainer.step_timeout_s must notice.

Nothing can notice a stopped parent."""


@dataclass(slots=True)
class Result:
    """Outcome of a case. Every list is empty when all is well."""

    case: Case
    engine: str
    kind: str = ""
    """The process that got the signal, empty if none did."""
    step: int = 0
    in_phase: bool = True
    """Whether the phase lasted until the signal was sent: a write still had its temporary name."""
    finished: dict[int, str] = field(default_factory=dict)
    """Steps that were finished at the signal, with the sha256 of their rollouts."""
    exit_code: int | None = None
    """None if the run survived or was already done."""
    ended_s: float | None = None
    """Seconds from the signal to the end of the run, or until it survived."""
    resumed_at: float | None = None
    """time.time() of the resume, None without one."""
    resume_s: float | None = None
    """Seconds from the resume until its adapter was verified; None if it was not resumed or hit before."""
    redone: int = 0
    """Finished steps after the newest checkpoint, which the resume trains again from their rollouts."""
    lost_steps: list[int] = field(default_factory=list)
    unequal: list[int] = field(default_factory=list)
    torn: list[str] = field(default_factory=list)
    orphans: list[str] = field(default_factory=list)
    tracebacks: list[str] = field(default_factory=list)
    hangs: list[str] = field(default_factory=list)

    @property
    def well(self) -> bool:
        return bool(self.kind) and not any(self.findings().values())

    def findings(self) -> dict[str, list[Any]]:
        """The lists that are not empty, by name."""
        return {
            k: v
            for k in ("lost_steps", "unequal", "torn", "orphans", "tracebacks", "hangs")
            if (v := getattr(self, k))
        }


def random_cases(count: int, seconds: float, seed: int) -> list[Case]:
    """Random signals at random moments. `seconds`: length of an undisturbed run."""
    rng = random.Random(seed)
    signals = ["KILL", "KILL", "KILL", "STOP", "STOP", "STOP+KILL"]
    return [
        Case("any", "random", rng.choice(signals), seed * 1000 + index, rng.uniform(0.2, seconds))
        for index in range(count)
    ]


def matrix_cases(kinds: tuple[str, ...] = KINDS) -> list[Case]:
    """Every kind at every phase with both signals, and HANGS."""
    return [Case(kind, phase, sent) for sent in SIGNALS for kind in kinds for phase in PHASES] + list(HANGS)


def as_row(result: Result, num_ranks: int) -> dict[str, Any]:
    """A line of the results file."""
    case = result.case
    return {
        "engine": result.engine,
        "ranks": num_ranks,
        "kind": result.kind or case.kind,
        "asked": case.kind,
        "phase": case.phase,
        "signal": case.signal,
        "number": case.number,
        "fired": bool(result.kind),
        "in_phase": result.in_phase,
        "step": result.step,
        "after_s": round(case.after_s, 1),
        "finished": len(result.finished),
        "exit": result.exit_code,
        "ended_s": result.ended_s,
        "resume_s": result.resume_s,
        "redone": result.redone,
        **result.findings(),
    }
