"""Ctrl-C and SIGTERM: the first signal stops the run within stop.grace_s, the second one at once."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import time
from collections.abc import Awaitable, Coroutine
from dataclasses import dataclass, field
from typing import Any

from skylite.errors import ChildDied, RunFailed, TrainerLost
from skylite.orchestrator.failures import TRAINER
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.progress import Progress
from skylite.processes.supervisor import Supervisor
from skylite.run.files import convert_os_errors
from skylite.run.run_dir import RunDir
from skylite.untrusted_files import open_to_append

logger = logging.getLogger(__name__)

FINISH_SHARE, TRAINER_SHARE = 0.6, 0.8
"""Fractions of stop.grace_s: the deadline for the current step, and for the trainer's checkpoint.
The remaining time is for ending processes."""
FAILURE_GRACE_S = 6.0
"""Wait after a failed request, in seconds: if a process has ended, its end explains the failure better."""
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

    def on_signal(self) -> None:
        """Count one signal."""
        if self.requested.is_set():
            self.forced.set()
        else:
            self.requested_at = time.monotonic()
            self.requested.set()

    def remaining_s(self, grace_s: float) -> float:
        """Seconds left until `grace_s` after the request."""
        self.requested_at = self.requested_at or time.monotonic()  # TimeLimit sets the event without a signal
        return self.requested_at + grace_s - time.monotonic()


def handle_signals(requested: asyncio.Event) -> StopRequest:
    """Turn SIGINT and SIGTERM into stop requests. Other code may set `requested` too."""
    stop = StopRequest(requested)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.on_signal)
    return stop


async def run_until_stopped(
    work: Coroutine[Any, Any, None],
    plan: RunPlan,
    supervisor: Supervisor,
    progress: Progress,
    stop: StopRequest,
) -> bool:
    """Wait until the work ends, a child process dies or a stop is requested.

    Returns True if the work is done. Returns False after a stop: the trainer had time to write its checkpoint
    and end. Raises the error of the work or of the child.
    """
    running, watching = asyncio.ensure_future(work), asyncio.ensure_future(supervisor.watch())
    try:
        await _wait_for_first(running, watching, stop.requested.wait())
        if (
            stop.requested.is_set()
            and plan.config.stop.mode == "finish"
            and progress.recorded < progress.step
        ):
            logger.info(
                f"finishing step {progress.step} first (stop.mode=finish); press Ctrl-C again to stop at once"
            )
            in_time = stop.remaining_s(plan.config.stop.grace_s * FINISH_SHARE)
            await _wait_for_first(
                running, watching, stop.forced.wait(), _recorded(progress, progress.step), timeout_s=in_time
            )
        if (
            running.done()
            and isinstance(error := running.exception(), RunFailed)
            and not isinstance(error, TrainerLost)
        ):
            await asyncio.wait({watching}, timeout=FAILURE_GRACE_S)
        for task in (watching, running):
            if task.done():
                task.result()
        if running.done():
            return True
    finally:
        for task in (running, watching):
            task.cancel()
        await asyncio.gather(running, watching, return_exceptions=True)
    await _stop_trainer(plan, supervisor, progress, stop)
    return False


def ask_trainer_to_end(run: RunDir) -> None:
    """Ask the trainer to write a checkpoint of its last step and end. Raises WriteFailed."""
    with convert_os_errors(run.stop_path):
        os.close(open_to_append(run.stop_path))


async def _stop_trainer(plan: RunPlan, supervisor: Supervisor, progress: Progress, stop: StopRequest) -> None:
    """Give the trainer time to write a checkpoint and end. Before its first adapter, it has none to write."""
    if stop.forced.is_set() or not plan.run.trainer_step_path(plan.first_step - 1).exists():
        return
    progress.phase("stopping", "the trainer writes its checkpoint")
    ask_trainer_to_end(plan.run)
    with contextlib.suppress(ChildDied):
        in_time = stop.remaining_s(plan.config.stop.grace_s * TRAINER_SHARE)
        await _wait_for_first(supervisor.wait_exit(TRAINER), stop.forced.wait(), timeout_s=in_time)


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


@dataclass(slots=True)
class TimeLimit:
    """Request a stop before a time limit passes. Not part of the run: a resume may use another limit."""

    hours: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    """Longest step so far, in seconds: the estimate for the next one."""
    reached: bool = False

    def step_ended(self, step_s: float) -> bool:
        """Note a finished step. Returns True and sets `stop` if the next step would pass the limit."""
        self.longest_s = max(self.longest_s, step_s)
        if time.monotonic() - self.started + self.longest_s > 3600 * self.hours:
            self.reached = True
            self.stop.set()
        return self.reached

    def __str__(self) -> str:
        return (
            f"--max-hours {self.hours:g}: stopping, because the next step ({self.longest_s:.1f} s) "
            "would pass the limit"
        )
