"""Ctrl-C and SIGTERM: the first asks for an end within stop.grace_s, the second insists on one now."""

from __future__ import annotations

import asyncio
import contextlib
import logging
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

logger = logging.getLogger(__name__)

FINISH_SHARE, TRAINER_SHARE = 0.6, 0.8
"""Of stop.grace_s: by when the step must be finished, and by when the trainer has its checkpoint. The rest is for ending processes."""
FAILURE_GRACE_S = 6.0
"""How long a broken request waits for the news that a process has ended, which explains it better."""
POLL_S = 0.02


@dataclass(slots=True)
class Stop:
    """What the user asked for."""

    asked: asyncio.Event
    insisted: asyncio.Event = field(default_factory=asyncio.Event)
    asked_at: float = 0.0
    """time.monotonic()"""

    def ask(self) -> None:
        """One signal."""
        if self.asked.is_set():
            self.insisted.set()
        else:
            self.asked_at = time.monotonic()
            self.asked.set()

    def left_s(self, grace_s: float) -> float:
        """Seconds until `grace_s` after the first signal."""
        self.asked_at = self.asked_at or time.monotonic()  # a time limit asks without a signal
        return self.asked_at + grace_s - time.monotonic()


def listen(asked: asyncio.Event) -> Stop:
    """From now on SIGINT and SIGTERM are heard here; `asked` may be set by others too."""
    stop = Stop(asked)
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.ask)
    return stop


async def run_until_stopped(
    work: Coroutine[Any, Any, None], plan: RunPlan, supervisor: Supervisor, progress: Progress, stop: Stop
) -> bool:
    """The work's end, a child's death or the end that was asked for, whichever comes first. True when the work is done; False leaves a
    trainer that has written its checkpoint and ended, if it could in time."""
    running, watching = asyncio.ensure_future(work), asyncio.ensure_future(supervisor.watch())
    try:
        await _first(running, watching, stop.asked.wait())
        if stop.asked.is_set() and plan.config.stop.mode == "finish" and progress.recorded < progress.step:
            logger.info(
                f"step {progress.step} is finished first (stop.mode=finish); once more to end at once"
            )
            in_time = stop.left_s(plan.config.stop.grace_s * FINISH_SHARE)
            await _first(
                running, watching, stop.insisted.wait(), _recorded(progress, progress.step), timeout_s=in_time
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
    """It writes a checkpoint of its last step and ends. Raises WriteFailed."""
    with convert_os_errors(run.stop_path):
        run.stop_path.touch()


async def _stop_trainer(plan: RunPlan, supervisor: Supervisor, progress: Progress, stop: Stop) -> None:
    """Ask the trainer for a checkpoint of its last step and its end. One that has not published anything has nothing to keep."""
    if stop.insisted.is_set() or not plan.run.trainer_step_path(plan.first_step - 1).exists():
        return
    progress.phase("stopping", "the trainer writes its checkpoint")
    ask_trainer_to_end(plan.run)
    with contextlib.suppress(ChildDied):
        in_time = stop.left_s(plan.config.stop.grace_s * TRAINER_SHARE)
        await _first(supervisor.wait_exit(TRAINER), stop.insisted.wait(), timeout_s=in_time)


async def _recorded(progress: Progress, step: int) -> None:
    while progress.recorded < step:
        await asyncio.sleep(POLL_S)


async def _first(*things: Awaitable[Any], timeout_s: float | None = None) -> None:
    """Until the first is done. Coroutines are cancelled then; tasks that came from outside go on."""
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
    """Asks for a stop in time. None of its fields says anything of the run itself: the same run may go on under another limit."""

    hours: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    """Of the steps so far: what the next one is taken to need."""
    reached: bool = False

    def step_ended(self, step_s: float) -> bool:
        """Note a finished step; whether the run is to end here, in which case `stop` is set."""
        self.longest_s = max(self.longest_s, step_s)
        if time.monotonic() - self.started + self.longest_s > 3600 * self.hours:
            self.reached = True
            self.stop.set()
        return self.reached

    def __str__(self) -> str:
        return (
            f"--max-hours {self.hours:g}: the next step, at {self.longest_s:.1f} s, would end after the limit"
        )
