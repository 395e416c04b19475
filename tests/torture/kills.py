"""Rounds: signals hit one run, which is checked and resumed. Its end is compared with an undisturbed run."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass, field

import psutil

from tests.torture.cases import KINDS, Case, Result
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
from tests.torture.moments import hit, moment, step_for, until

STOP_HELD_S = 2.0
"""Then the process is continued, and the run must survive."""
END_S = 300.0
"""A run that neither finishes a step nor ends within this time hangs."""
GONE_S = 20.0
"""Time for the processes of a run that ended to be gone."""
STEPS_TO_SURVIVE = 2
"""A run has survived after this many more steps. One that is about to end may still record the next one."""
MISSES = 3
"""Rounds in which a case may miss its moment before it is given up."""


@dataclass(slots=True)
class Round:
    """One run under torture."""

    ground: Ground
    name: str
    expected: dict[int, str]
    started: Started
    results: list[Result] = field(default_factory=list)
    struck: bool = False
    """Whether a signal was sent since the last start. If a run ends without one, its resume failed."""


def undisturbed(ground: Ground) -> tuple[dict[int, str], float]:
    """Adapter digests by version of an undisturbed run, and its seconds."""
    started, began = ground.start("undisturbed"), time.monotonic()
    assert until(lambda: started.process.poll() is not None, END_S), "the undisturbed run hangs"
    assert started.process.returncode == 0, started.text()
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
    """Take one run to its end. Cases that were executed or given up leave the queue."""
    run, complete = this.ground.run(this.name), True
    try:
        while complete and not is_over(this):
            if this.started.process.poll() is not None:  # it recorded its next steps and ended after them
                complete = bool(this.results) and ended(this, this.results[-1])
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
                complete = settle(this, result)
            else:
                give_up(this, case, queue, misses)
        if this.results:
            check_end(this.started, this.results[-1])
            compare(this, complete)
    finally:
        this.started.kill_all()
    return this.results


def is_over(this: Round) -> bool:
    """Whether nothing is left to do. A parent killed at its very end has recorded that."""
    code = this.started.process.poll()
    return code == 0 or (code is not None and is_done(this.ground.run(this.name)))


def next_case(this: Round, queue: deque[Case]) -> Case | None:
    """The first case whose moment this start has not passed. None when no step is left."""
    if last_finished(this.ground.run(this.name)) == STEPS:
        return None
    age = time.time() - this.started.wall
    return next((case for case in queue if case.phase != "random" or case.after_s > age), None)


def to_its_end(this: Round) -> None:
    """Wait until the run ends."""
    if not until(lambda: this.started.process.poll() is not None, END_S):
        this.results[-1].hangs.append("the last steps did not end")
        this.started.kill_all()


def give_up(this: Round, case: Case, queue: deque[Case], misses: dict[Case, int]) -> None:
    """Try a case that missed its moment in another round, or record it as not fired."""
    queue.remove(case)
    # A resumed run is shorter than the undisturbed one that random moments were drawn from.
    if case.phase == "random" and this.results:
        queue.append(case)
        return
    misses[case] = misses.get(case, 0) + 1
    if misses[case] < MISSES:
        queue.append(case)
    else:
        this.results.append(Result(case, this.ground.engine))


def strike(this: Round, case: Case) -> Result:
    """Wait for the moment and send the signal. If the run ended before, the result has no kind."""
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
    """Continue a stopped process, or kill the parent, after STOP_HELD_S."""
    if case.signal in ("STOP", "STOP+KILL"):
        time.sleep(STOP_HELD_S)
        with contextlib.suppress(psutil.NoSuchProcess):
            started.process.kill() if case.signal == "STOP+KILL" else target.send_signal(signal.SIGCONT)


def settle(this: Round, result: Result) -> bool:
    """Wait until the run survives or ends, and resume it if it ended. False if the round cannot continue."""
    run, began, process = this.ground.run(this.name), time.monotonic(), this.started.process
    goal = min(STEPS, max([last_finished(run), *result.finished]) + STEPS_TO_SURVIVE)
    if not until(lambda: process.poll() is not None or last_finished(run) >= goal, END_S):
        result.hangs.append("the run neither survived nor ended")
        this.started.kill_all()
    result.ended_s = round(time.monotonic() - began, 2)
    return process.poll() in (None, 0) or ended(this, result)


def ended(this: Round, result: Result) -> bool:
    """The run ended before its last step: check what it left and resume it. False if its resume failed."""
    run, result.exit_code = this.ground.run(this.name), this.started.process.returncode
    check_end(this.started, result)
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
        result.tracebacks.append(f"the resume ended with {result.exit_code}: {this.started.text()[-800:]}")
        return False
    this.struck, result.resumed_at = False, time.time()
    this.started = this.ground.start(this.name, resume=run.config_path.exists())
    return True


def check_end(started: Started, result: Result) -> None:
    """No process may be left, the run must give a reason, and only its quoted log may hold a traceback."""
    until(lambda: not started.alive(), GONE_S, 0.1)
    result.orphans += [describe(p) for p in started.alive()]
    text = started.text().split("The last lines of its log")[0]
    if "Traceback (most recent call last)" in text:
        result.tracebacks.append(text[-1500:])
    if started.process.returncode in (1, 2) and "skylite: " not in text:
        result.tracebacks.append(f"it ended without a reason: {text[-600:]}")


def compare(this: Round, complete: bool) -> None:
    """End of a round: every adapter equals the undisturbed run's, and finished steps are unchanged."""
    run, last = this.ground.run(this.name), this.results[-1]
    done, found = finished_steps(run), digests(run)
    if complete:
        last.unequal += [v for v in this.expected if found.get(v) != this.expected[v]]
        last.torn += torn(run) + leftovers(run)
    for result in this.results:
        result.resume_s = None if result.resumed_at is None else verified_after(run, result.resumed_at)
        result.lost_steps = [
            step for step, digest in result.finished.items() if done.get(step) != digest or step not in found
        ]


def describe(process: psutil.Process) -> str:
    try:
        return f"{process.pid} {process.status()} {' '.join(process.cmdline())[:120]}"
    except psutil.Error:
        return str(process.pid)
