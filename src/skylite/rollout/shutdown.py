"""Signals that stop a run: the first one finishes the step, a second one ends everything at once.

Ctrl-C gives the step all the time it needs. SIGTERM comes from a scheduler that kills soon, and SIGHUP from a
terminal that is gone: they have stop.grace_s.

Consumes: signals, --max-hours, the end of a child. Waits for: the step, then the trainer's checkpoint.
Produces: the stop file. Unblocks: the trainer's end, and with it the end of the session.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import math
import os
import signal
import stat
import statistics
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from skylite.errors import ChildDied, DataError, EngineFailed, RunFailed, TrainerLost, convert_os_errors
from skylite.processes.child import Supervisor
from skylite.rollout.failures import TRAINER
from skylite.rollout.plan import RunPlan
from skylite.rollout.session import Progress
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir
from skylite.untrusted_files import open_to_append

logger = logging.getLogger(__name__)

FINISH_SHARE, TRAINER_SHARE = 0.6, 0.8
"""Fractions of stop.grace_s: the deadline for the current step, and for the trainer's checkpoint.
The remaining time is for ending processes."""
FAILURE_GRACE_S = 6.0
"""Wait after a failed request, in seconds: if a process has ended, its end explains the failure better."""
STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
REPEAT_S = 0.5
"""A signal so soon after one is the same: `timeout` sends it to the process and to its group."""
LATE_SIGNAL_S = 0.5
"""Wait after a child's end for the signal that may have ended it: a scheduler sends it to every process."""
RECENT_STEPS = 5
POLL_S = 0.02


@dataclass(slots=True)
class StopRequest:
    """Whether the run must stop, and how soon."""

    requested: asyncio.Event
    """Stop within stop.grace_s."""
    forced: asyncio.Event = field(default_factory=asyncio.Event)
    """Stop at once."""
    requested_at: float = 0.0
    """time.monotonic() of the request; 0 if there is none, or until `remaining_s` is first called."""

    is_patient: bool = False
    """Ctrl-C: nobody kills the run after a while, so the step may take as long as it needs."""
    last_signal: float = -math.inf
    continues: bool = False
    """The run itself asked for the stop, and continues after it unless a signal comes."""

    def on_signal(self, number: int) -> None:
        """Count one signal."""
        now, before = time.monotonic(), self.last_signal
        self.last_signal = now
        if self.continues:  # the first signal, then
            self.continues = False
            self.requested.clear()
        if number == signal.SIGHUP:
            forget_terminal()
        if not self.requested.is_set():
            self.is_patient, self.requested_at = number == signal.SIGINT, now
            self.requested.set()
        elif self.is_patient and number != signal.SIGINT:
            self.is_patient, self.requested_at = False, now
        elif now - before >= REPEAT_S:
            self.forced.set()

    def take_back(self) -> bool:
        """Take the stop back if the run continues after it. Returns whether it does."""
        continues, self.continues = self.continues, False
        if continues:
            self.requested.clear()
            self.requested_at = 0.0
        return continues

    def step_ended(self) -> None:
        """Start the grace now, if the step had all the time it needed."""
        if self.is_patient:
            self.is_patient, self.requested_at = False, time.monotonic()

    async def out_of_time(self, grace_s: float) -> None:
        """Return `grace_s` after the request; never while the stop is patient."""
        while self.is_patient or self.remaining_s(grace_s) > 0:
            await asyncio.sleep(POLL_S)

    def remaining_s(self, grace_s: float) -> float:
        """Seconds left until `grace_s` after the request."""
        self.requested_at = self.requested_at or time.monotonic()  # TimeLimit sets the event without a signal
        return self.requested_at + grace_s - time.monotonic()


def handle_signals(requested: asyncio.Event) -> StopRequest:
    """Turn STOP_SIGNALS into stop requests. Other code may set `requested` too."""
    stop = StopRequest(requested)
    on_signals(stop.on_signal)
    return stop


def on_signals(act: Callable[[int], None]) -> None:
    """Call `act` with each of STOP_SIGNALS. Obeys nohup."""
    for number in STOP_SIGNALS:
        if signal.getsignal(number) != signal.SIG_IGN or number != signal.SIGHUP:
            asyncio.get_running_loop().add_signal_handler(number, act, number)


def forget_terminal() -> None:
    """Send output to /dev/null where it went to a terminal that is gone: each write would fail."""
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        try:
            is_file = not stat.S_ISCHR(os.fstat(descriptor).st_mode)
        except OSError:
            is_file = False
        if not is_file:
            os.dup2(null, descriptor)
    os.close(null)


async def run_until_stopped(
    work: Coroutine[Any, Any, None],
    plan: RunPlan,
    supervisor: Supervisor,
    progress: Progress,
    stop: StopRequest,
    trainer_exit: Callable[[], Coroutine[Any, Any, None]] | None = None,
) -> bool:
    """Wait until the work ends, a child process dies or a stop is requested.

    Returns True if the work is done. Returns False after a stop: the trainer had time to write its checkpoint
    and end. Raises the error of the work or of the child. `trainer_exit`: waits for a trainer that is not a
    child of `supervisor`.
    """
    running, watching = asyncio.ensure_future(work), asyncio.ensure_future(supervisor.watch())
    try:
        await _wait_for_first(running, watching, stop.requested.wait())
        step, since = progress.step, progress.step_since  # one that begins later is not lost but not begun
        if stop.requested.is_set() and plan.config.stop.mode == "finish" and progress.recorded < step:
            logger.info(_finishing_text(plan, progress, stop))
            limit_s = plan.config.stop.grace_s * FINISH_SHARE
            recorded = _recorded(progress, step)
            await _wait_for_first(running, watching, stop.forced.wait(), recorded, stop.out_of_time(limit_s))
            stop.step_ended()
        if (
            running.done()
            and isinstance(error := running.exception(), RunFailed)
            and not isinstance(error, TrainerLost)
        ):
            await asyncio.wait({watching}, timeout=FAILURE_GRACE_S)
        for task in (watching, running):
            if task.done() and await _is_stop(task, plan.run, stop):
                logger.warning(f"{task.exception()} It ended with the stop.")
                break
            if task.done():
                task.result()
        else:
            if running.done():
                return True
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
    spent_s = time.monotonic() - since
    exited = (trainer_exit or partial(supervisor.wait_exit, TRAINER))()
    await _stop_trainer(plan, exited, progress, stop)
    if text := _lost_text(plan.run, progress.recorded, step, spent_s):
        logger.warning(text)
    return False


async def _is_stop(task: asyncio.Future[None], run: RunDir, stop: StopRequest) -> bool:
    """Whether a child ended because a scheduler signalled every process of the run."""
    if not isinstance(task.exception(), ChildDied | EngineFailed) or run.trainer_error_path.exists():
        return False
    with contextlib.suppress(TimeoutError):
        await asyncio.wait_for(stop.requested.wait(), LATE_SIGNAL_S)
    return stop.requested.is_set()


def _finishing_text(plan: RunPlan, progress: Progress, stop: StopRequest) -> str:
    """How long the stop will take, from the steps so far."""
    try:
        lines = read_metrics(plan.run.metrics_path)
    except DataError:
        lines = []
    recent = [s for s in (number_of(line, "time/step_s") for line in lines[-RECENT_STEPS:]) if s is not None]
    if recent:
        step_s = statistics.median(recent)
        left = step_s - (time.monotonic() - progress.step_since)
        takes = (
            f"about {max(left, 1):.0f} s more" if left > 0 else f"longer than the {step_s:.0f} s of others"
        )
    else:
        takes = "no step has ended yet, so how long that takes is unknown"
    limit = "" if stop.is_patient else f", {plan.config.stop.grace_s * FINISH_SHARE:.0f} s at most"
    again = "; Ctrl-C again abandons the step" if stop.is_patient else ""
    return f"finishing step {progress.step} first ({takes}{limit}){again}"


def number_of(metrics: Mapping[str, Any], key: str) -> float | None:
    value = metrics.get(key)
    return float(value) if isinstance(value, int | float) and math.isfinite(value) else None


def _lost_text(run: RunDir, recorded: int, step: int, spent_s: float) -> str:
    """What a stop in `step` loses; empty if that is nothing."""
    texts, steps = [], checkpoint_steps(run)
    saved = steps[-1] if steps else 0
    if saved < recorded:
        span = f"step {recorded}" if recorded == saved + 1 else f"steps {saved + 1} to {recorded}"
        texts.append(f"{span} has no checkpoint yet: a resume trains again on the stored completions")
    if recorded < step:
        kept = run.rollout_path(step).exists()
        how = "trains again on its stored completions" if kept else "samples it again"
        texts.append(f"step {step} is abandoned after {spent_s:.0f} s: a resume {how}")
    return "; ".join(texts)


def ask_trainer_to_end(run: RunDir) -> None:
    """Ask the trainer to write a checkpoint of its last step and end. Raises WriteFailed."""
    with convert_os_errors(run.stop_path):
        os.close(open_to_append(run.stop_path))


async def _stop_trainer(
    plan: RunPlan, exited: Coroutine[Any, Any, None], progress: Progress, stop: StopRequest
) -> None:
    """Give the trainer time to write a checkpoint and end. Before its first adapter, it has none to write."""
    if stop.forced.is_set() or not plan.run.trainer_step_path(plan.first_step - 1).exists():
        exited.close()
        return
    progress.phase("stopping", "the trainer writes its checkpoint")
    ask_trainer_to_end(plan.run)
    with contextlib.suppress(ChildDied):
        in_time = stop.remaining_s(plan.config.stop.grace_s * TRAINER_SHARE)
        await _wait_for_first(exited, stop.forced.wait(), timeout_s=in_time)


async def _recorded(progress: Progress, step: int) -> None:
    while progress.recorded < step:
        await asyncio.sleep(POLL_S)


async def _wait_for_first(*things: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Wait until one is done. Then cancel the coroutines among `things`; the caller's tasks keep running."""
    tasks = [asyncio.ensure_future(thing) for thing in things]
    try:
        await asyncio.wait(tasks, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
    finally:
        own = [task for task, thing in zip(tasks, things, strict=True) if task is not thing]
        for task in own:
            task.cancel()
        await asyncio.gather(*own, return_exceptions=True)
