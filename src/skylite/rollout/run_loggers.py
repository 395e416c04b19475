"""The loggers of a run: started with it, watched beside it, ended after it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from skylite.errors import DataError
from skylite.loggers.follow import fingerprints
from skylite.loggers.logger_processes import LoggerProcess, count_steps, start_loggers
from skylite.processes.child import poll
from skylite.progress_reporting import long_work
from skylite.rollout.plan import RunPlan
from skylite.rollout.shutdown import StopRequest
from skylite.run.metrics_file import read_metrics
from skylite.run.run_dir import RunDir

logger = logging.getLogger(__name__)
WATCH_S = 2.0
POLL_S = 0.05
FINISH_S = 30.0
"""Time for the loggers to log the rest after the run: wandb and others then send what they hold."""


@asynccontextmanager
async def loggers_running(plan: RunPlan, stop: StopRequest) -> AsyncIterator[None]:
    """Follow the run with every logger of log.to. They end within FINISH_S, or within the rest of a stop."""
    processes = start_loggers(plan.run, plan.config.log.to)
    watching = asyncio.ensure_future(_watch(processes))
    try:
        yield
    finally:
        watching.cancel()
        try:
            if processes:
                await _finish(processes, plan.run, stop, plan.config.stop.grace_s)
        finally:
            for process in processes:
                process.end()


async def _watch(processes: Sequence[LoggerProcess]) -> None:
    """Report every logger that fails."""
    while True:
        for process in processes:
            if problem := process.failure():
                process.report(problem)
        await asyncio.sleep(WATCH_S)


async def _finish(processes: Sequence[LoggerProcess], run: RunDir, stop: StopRequest, grace_s: float) -> None:
    for process in processes:
        process.finish()
    limit_s = stop.remaining_s(grace_s) if stop.requested.is_set() else FINISH_S
    until, steps = time.monotonic() + limit_s, _recorded_steps(run)
    names = ", ".join(process.name for process in processes)
    with long_work(f"waiting for {names} to finish, {limit_s:.0f} s at most") as work:
        while any(poll(p.child) is None for p in processes) and not stop.forced.is_set():
            if time.monotonic() > until:
                break
            count_steps(work, processes, steps)
            await asyncio.sleep(POLL_S)
    for process in processes:
        is_late = poll(process.child) is None
        if problem := "it did not end in time" if is_late else process.failure():
            process.report(problem)


def _recorded_steps(run: RunDir) -> dict[int, str]:
    """Fingerprints of the run's steps; none if metrics.jsonl is damaged, which each logger reports."""
    try:
        return fingerprints(read_metrics(run.metrics_path))
    except DataError:
        return {}
