"""Rounds: a run is disturbed again and again, looked at and resumed after each, until its last step is done, and then compared."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.torture.evidence import (
    digests,
    finished_steps,
    is_done,
    last_finished,
    leftovers,
    newest_checkpoint,
    newest_trace,
    torn,
    verified_after,
)
from tests.torture.ground import STEPS, Ground, Started, victims
from tests.torture.moments import PHASES, hit, moment, step_for, until

KINDS = ("parent", "reaper-trainer", "reaper-engine", "agent", "rank-0", "engine", "reward-worker")
SIGNALS = ("KILL", "STOP")
STOP_HELD_S = 2.0
"""Then it is continued, and the run must go on."""
END_S = 300.0
"""A run that neither goes on nor ends within this hangs."""
GONE_S = 20.0
"""What the processes of a run that ended get to be gone."""
GOES_ON = 2
"""So many steps more, and a run has survived: the next one or two may still be recorded by a run that is about to end."""
MISSES = 3


@dataclass(frozen=True, slots=True)
class Case:
    """Who gets which signal when."""

    kind: str
    """One of KINDS; "any": whoever of them is there."""
    phase: str
    """One of PHASES, or "random"."""
    signal: str
    """KILL; STOP: continued after STOP_HELD_S; STOP+KILL: then the parent is killed while the other is stopped; HANG: not continued."""
    number: int = 0
    """Tells random moments apart."""
    after_s: float = 0.0
    """For "random": seconds from the start or the resume."""


HANGS = (
    *(Case("engine", phase, "HANG") for phase in ("sampling", "publish", "load")),
    Case("reward-worker", "scoring", "HANG"),
    *(Case("rank-0", phase, "HANG") for phase in ("train", "publish", "checkpoint")),
    *(Case(kind, "train", "HANG") for kind in ("agent", "reaper-trainer", "reaper-engine")),
)
"""Stopped and not continued: engine.stall_timeout_s, reward.timeout_s and trainer.step_timeout_s end that.
A parent that is stopped nobody can tell."""


@dataclass(slots=True)
class Result:
    """What became of a case. All lists are empty when all is well."""

    case: Case
    engine: str
    kind: str = ""
    """Who got the signal; empty: nobody."""
    step: int = 0
    in_phase: bool = True
    """A write was still under its temporary name when the signal had been sent."""
    finished: dict[int, str] = field(default_factory=dict)
    """Steps that were finished at the signal, and the sha256 of their rollouts."""
    exit_code: int | None = None
    """None: the run went on by itself, or its last word had been said."""
    ended_s: float | None = None
    """From the signal to the end of the run, or to GOES_ON more steps."""
    resumed_at: float | None = None
    """time.time; None: nothing was resumed."""
    resume_s: float | None = None
    """From the resume's start until its adapter was verified; None: nothing was resumed, or the next signal was sooner."""
    redone: int = 0
    """Finished steps after the newest checkpoint: the resume trains them again from their rollouts."""
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
        """What is wrong, by name."""
        return {
            k: v
            for k in ("lost_steps", "unequal", "torn", "orphans", "tracebacks", "hangs")
            if (v := getattr(self, k))
        }


@dataclass(slots=True)
class Round:
    """A run under torture."""

    ground: Ground
    name: str
    expected: dict[int, str]
    started: Started
    results: list[Result] = field(default_factory=list)
    struck: bool = False
    """Since it was started or resumed; a run that ends without is one whose resume failed."""


def undisturbed(ground: Ground) -> tuple[dict[int, str], float]:
    """Digests of every version of a run that nothing happens to, and its seconds."""
    started, began = ground.start("undisturbed"), time.monotonic()
    assert until(lambda: started.process.poll() is not None, END_S), "the undisturbed run hangs"
    assert started.process.returncode == 0, started.said()
    found = digests(ground.run("undisturbed"))
    assert sorted(found) == list(range(STEPS + 1)), found
    return found, time.monotonic() - began


def torture(
    ground: Ground, cases: list[Case], expected: dict[int, str], until_s: float
) -> Iterator[list[Result]]:
    """Rounds until no case is left or time.monotonic() is past `until_s`; yields the results of each."""
    queue, misses, number = deque(cases), dict[Case, int](), 0
    while queue and time.monotonic() < until_s:
        number += 1
        name = f"{ground.engine}-round-{int(time.time())}-{number}"
        yield one_round(Round(ground, name, expected, ground.start(name)), queue, misses, until_s)


def one_round(this: Round, queue: deque[Case], misses: dict[Case, int], until_s: float) -> list[Result]:
    """One run to its end. Cases leave the queue as they are done; one whose moment did not come in MISSES rounds is given up."""
    run, whole = this.ground.run(this.name), True
    try:
        while whole and not is_over(this):
            if this.started.process.poll() is not None:  # it ended later than its next steps made one think
                whole = bool(this.results) and ended(this, this.results[-1])
                continue
            case = next_case(this, queue) if time.monotonic() < until_s else None
            if case is None or (case.phase != "random" and step_for(case.phase, newest_trace(run)) > STEPS):
                to_its_end(this)
                continue
            result = strike(this, case)
            if result.kind:
                this.results.append(result)
                this.struck = True
                queue.remove(case)
                whole = settle(this, result)
            else:
                give_up(this, case, queue, misses)
        if this.results:
            look_around(this.started, this.results[-1])
            compare(this, whole)
    finally:
        this.started.kill_all()
    return this.results


def is_over(this: Round) -> bool:
    """Nothing is left to do or to resume: a parent that is killed in its last moments has recorded that the run is done."""
    code = this.started.process.poll()
    return code == 0 or (code is not None and is_done(this.ground.run(this.name)))


def next_case(this: Round, queue: deque[Case]) -> Case | None:
    """The first whose moment is still ahead: a random one that this start has left behind, or that has no step left to disturb, waits."""
    if last_finished(this.ground.run(this.name)) == STEPS:
        return None
    age = time.time() - this.started.wall
    return next((case for case in queue if case.phase != "random" or case.after_s > age), None)


def to_its_end(this: Round) -> None:
    if not until(lambda: this.started.process.poll() is not None, END_S):
        this.results[-1].hangs.append("the last steps did not end")
        this.started.kill_all()


def give_up(this: Round, case: Case, queue: deque[Case], misses: dict[Case, int]) -> None:
    """A case whose moment did not come is tried in another round, then recorded as not fired."""
    queue.remove(case)
    if (
        case.phase == "random" and this.results
    ):  # a run that was resumed is shorter than the one that the moments were drawn for
        queue.append(case)
        return
    misses[case] = misses.get(case, 0) + 1
    if misses[case] < MISSES:
        queue.append(case)
    else:
        this.results.append(Result(case, this.ground.engine))


def strike(this: Round, case: Case) -> Result:
    """Wait for the moment and send the signal. The result has no kind when the run ended before it."""
    run, started, result = this.ground.run(this.name), this.started, Result(case, this.ground.engine)
    if case.phase == "random":
        is_now, due = (lambda: False), started.wall + case.after_s
        until(lambda: started.process.poll() is not None or time.time() >= due, END_S)
        kinds = {k: p for k, p in victims(started).items() if k in KINDS or k.startswith(("rank", "engine"))}
        kind = random.Random(case.number).choice(sorted(kinds)) if kinds else ""
        target = kinds.get(kind)
    else:
        kind, found = case.kind, dict[str, psutil.Process]()
        until(
            lambda: bool(
                found.update(victims(started)) or kind in found or started.process.poll() is not None
            ),
            END_S,
            0.1,
        )
        target, result.step = found.get(kind), step_for(case.phase, newest_trace(run))
        is_now = moment(run, this.ground.scored(this.name), case.phase, result.step)
        until(lambda: is_now() or started.process.poll() is not None, END_S, 0.0005)
    if target is None or started.process.poll() is not None or (case.phase != "random" and not is_now()):
        return result
    try:
        target.send_signal(signal.SIGKILL if case.signal == "KILL" else signal.SIGSTOP)
    except psutil.NoSuchProcess:
        return result
    result.kind, result.in_phase = kind, hit(run, case.phase, result.step)
    result.finished = finished_steps(run)
    after_stop(case, target, started)
    return result


def after_stop(case: Case, target: psutil.Process, started: Started) -> None:
    """What follows on SIGSTOP."""
    if case.signal in ("STOP", "STOP+KILL"):
        time.sleep(STOP_HELD_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            started.process.kill() if case.signal == "STOP+KILL" else target.send_signal(signal.SIGCONT)


def settle(this: Round, result: Result) -> bool:
    """Until the run has gone on or ended; then it is resumed. False when this round cannot go on."""
    run, began, process = this.ground.run(this.name), time.monotonic(), this.started.process
    goal = min(STEPS, max([last_finished(run), *result.finished]) + GOES_ON)
    if not until(lambda: process.poll() is not None or last_finished(run) >= goal, END_S):
        result.hangs.append("the run neither went on nor ended")
        this.started.kill_all()
    result.ended_s = round(time.monotonic() - began, 2)
    return process.poll() in (None, 0) or ended(this, result)


def ended(this: Round, result: Result) -> bool:
    """The run is over before its last step: look at what it left, and go on with it."""
    run, result.exit_code = this.ground.run(this.name), this.started.process.returncode
    look_around(this.started, result)
    result.torn += torn(run)
    now = finished_steps(run)
    result.finished |= {step: digest for step, digest in now.items() if step not in result.finished}
    result.redone = sum(step > newest_checkpoint(run) for step in now)
    result.unequal += [v for v, digest in digests(run).items() if digest != this.expected[v]]
    this.started.kill_all()
    if is_over(this):
        result.exit_code = None
        return True
    if not this.struck:
        result.tracebacks.append(f"the resume ended with {result.exit_code}: {this.started.said()[-800:]}")
        return False
    this.struck, result.resumed_at = False, time.time()
    this.started = this.ground.start(this.name, resume=run.config_path.exists())
    return True


def look_around(started: Started, result: Result) -> None:
    """Nobody may be left, a run that ended says why, and nobody is shown a traceback but in the log's last lines."""
    until(lambda: not started.alive(), GONE_S, 0.1)
    result.orphans += [describe(p) for p in started.alive()]
    said = started.said().split("The last lines of its log")[0]
    if "Traceback (most recent call last)" in said:
        result.tracebacks.append(said[-1500:])
    if started.process.returncode in (1, 2) and "skylite: " not in said:
        result.tracebacks.append(f"it ended without a reason: {said[-600:]}")


def compare(this: Round, whole: bool) -> None:
    """The end of a round: every step there, with the undisturbed run's bytes, and what had been finished still what it was."""
    run, last = this.ground.run(this.name), this.results[-1]
    done, found = finished_steps(run), digests(run)
    if whole:
        last.unequal += [v for v in this.expected if found.get(v) != this.expected[v]]
        last.torn += torn(run) + leftovers(run)
    for result in this.results:
        result.resume_s = None if result.resumed_at is None else verified_after(run, result.resumed_at)
        result.lost_steps = [
            step for step, digest in result.finished.items() if done.get(step) != digest or step not in found
        ]


def random_cases(count: int, seconds: float, seed: int) -> list[Case]:
    """Moments over the whole of an undisturbed run, counted from the start or the resume."""
    rng = random.Random(seed)
    signals = ["KILL", "KILL", "KILL", "STOP", "STOP", "STOP+KILL"]
    return [
        Case("any", "random", rng.choice(signals), seed * 1000 + index, rng.uniform(0.2, seconds))
        for index in range(count)
    ]


def matrix_cases(kinds: tuple[str, ...] = KINDS) -> list[Case]:
    """Every kind at every phase, both signals; and those that are left stopped for the run to notice."""
    return [Case(kind, phase, sent) for sent in SIGNALS for kind in kinds for phase in PHASES] + list(HANGS)


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)


def as_row(result: Result, num_ranks: int) -> dict[str, Any]:
    """A line of the results file."""
    case = result.case
    return {
        "engine": result.engine, "ranks": num_ranks, "kind": result.kind or case.kind, "asked": case.kind, "phase": case.phase,
        "signal": case.signal, "number": case.number, "fired": bool(result.kind), "in_phase": result.in_phase, "step": result.step,
        "after_s": round(case.after_s, 1), "finished": len(result.finished), "exit": result.exit_code, "ended_s": result.ended_s,
        "resume_s": result.resume_s, "redone": result.redone, **result.findings(),
    }  # fmt: skip
