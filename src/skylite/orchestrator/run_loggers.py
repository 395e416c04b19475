"""The loggers of a run: started with it, watched beside it, ended after it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, nullcontext

from skylite.loggers.processes import LoggerProcess, start_loggers
from skylite.long_work import long_work
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.shutdown import StopRequest
from skylite.processes.child import poll

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
            await _finish(processes, stop, plan.config.stop.grace_s)
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


async def _finish(processes: Sequence[LoggerProcess], stop: StopRequest, grace_s: float) -> None:
    for process in processes:
        process.finish()
    until = time.monotonic() + (stop.remaining_s(grace_s) if stop.requested.is_set() else FINISH_S)
    names = ", ".join(process.name for process in processes)
    with long_work(f"waiting for {names} to finish") if processes else nullcontext():
        while any(poll(p.child) is None for p in processes) and not stop.forced.is_set():
            if time.monotonic() > until:
                break
            await asyncio.sleep(POLL_S)
    for process in processes:
        is_late = poll(process.child) is None
        if problem := "it did not end in time" if is_late else process.failure():
            process.report(problem)
