"""A run's resources, in order: locks, screen, trainer, engines, reward workers; and their end, whatever ends the run."""

from __future__ import annotations

import asyncio
import contextlib
import signal
from collections.abc import Coroutine
from functools import partial
from pathlib import Path
from typing import Any

from skylite.errors import ChildDied, RunFailed, SkyliteError, WriteFailed, write_failed
from skylite.launch.machine import cpu_cores
from skylite.launch.processes import ProcessSpec
from skylite.launch.supervisor import Supervisor
from skylite.launch.torchrun import trainer_command, trainer_env
from skylite.models import likely_target_modules
from skylite.orchestrator.engine_set import open_engines, ready_engines
from skylite.orchestrator.keeper import Restarts
from skylite.orchestrator.loop import run_steps, wait_for_update
from skylite.orchestrator.plan import RunPlan, write_config
from skylite.orchestrator.progress import Progress
from skylite.orchestrator.resume import forget_after
from skylite.orchestrator.session import Session
from skylite.orchestrator.time_limit import TimeLimit
from skylite.rewards.pool import RewardPool
from skylite.rollout.canary import DEFAULT_TOLERANCE, canary_sequences, prove_folder
from skylite.rollout.engines import Engines
from skylite.rollout.tokenizer import load_tokenizer
from skylite.run.files import write_json
from skylite.run.lock import lock_folder
from skylite.run.manifest import read_manifest
from skylite.run.metrics import read_metrics, with_nan
from skylite.run.run_dir import adapter_name
from skylite.ui.closing import finished_text, stopped_text
from skylite.ui.dashboard import Screen

TRAINER = "trainer"
STOP_GRACE_S = 20.0
"""What a Ctrl-C waits for the trainer to end its step and write its checkpoint before everything is ended."""
FAILURE_GRACE_S = 6.0
"""How long a broken request waits for the news that a process has ended, which explains it better."""


async def run_session(plan: RunPlan, *, resume: bool, limit: TimeLimit | None = None) -> bool:
    """Run all steps. Returns whether the run finished: False after a clean stop, by a signal or by `limit`. Raises RunFailed subclasses."""
    adapters = Path(plan.resolved.lora_sync_path)
    with lock_folder(plan.run.root), lock_folder(adapters):
        plan.run.stop_path.unlink(missing_ok=True)
        plan.run.trainer_error_path.unlink(missing_ok=True)
        notes: list[str] = []
        if resume:
            write_config(plan)
            forget_after(plan.run, adapters, plan.first_step - 1, notes.append, reuse_rollouts=plan.reuse_rollouts)
        with Screen(plan.config.num_steps, history=[with_nan(m) for m in read_metrics(plan.run.metrics_path)]) as screen:
            for note in notes:
                screen.say(note)
            return await _supervised(plan, screen, adapters, resume, limit)


async def _supervised(plan: RunPlan, screen: Screen, adapters: Path, resume: bool, limit: TimeLimit | None) -> bool:
    """The run under a supervisor, in folders that are ours, until it is done, stopped or failed."""
    stop = _stop_event(limit.stop if limit is not None else asyncio.Event())
    async with Supervisor() as supervisor:
        progress = Progress(plan.run, plan.config.num_steps, screen, supervisor.pids, step=plan.first_step - 1)
        try:
            finished = await _first_of(_run(plan, supervisor, progress, resume, limit), supervisor, stop)
            if not finished:
                progress.phase("stopping", "the trainer writes its checkpoint")
                await _stop_trainer(plan, supervisor)
        except (SkyliteError, OSError) as error:
            explained = _explained(plan, write_failed(error) if isinstance(error, OSError) else error)
            # A disk that refuses the status as well must not hide why the run ended.
            with contextlib.suppress(WriteFailed):
                progress.phase("failed", error=str(explained))
            raise explained from None
    progress.phase("done" if finished else "stopped")
    screen.say(finished_text(plan.run, adapters, screen.state.evaluations) if finished else stopped_text(plan.run, adapters))
    return finished


async def _run(plan: RunPlan, supervisor: Supervisor, progress: Progress, resume: bool, limit: TimeLimit | None) -> None:
    """Bring everything up side by side, then every step."""
    progress.event("run_started")
    progress.phase("starting", f"vLLM: {plan.config.engine.num_engines} engine(s); trainer: {plan.config.trainer.num_ranks} rank(s)")
    plan.run.canary_path.unlink(missing_ok=True)  # the trainer waits for this attempt's
    async with contextlib.AsyncExitStack() as stack:
        modules = likely_target_modules(Path(plan.resolved.model_path), plan.config.lora)
        tolerance = plan.config.sync.canary_tolerance or DEFAULT_TOLERANCE[plan.resolved.dtype]
        restarts = Restarts(config=plan.config.engine, prove=partial(prove_folder, tolerance=tolerance), tell=progress.restarted)
        keepers = await stack.enter_async_context(open_engines(plan, modules, supervisor, restarts))
        progress.event("engines_started")
        supervisor.start(_trainer_spec(plan, resume))
        progress.event("trainer_started")
        tokenizer = await asyncio.to_thread(load_tokenizer, Path(plan.resolved.model_path))
        if tokenizer.note:
            progress.screen.say(tokenizer.note)
        write_json(plan.run.canary_path, {"sequences": canary_sequences(tokenizer, plan.train)})
        progress.event("tokenizer_ready")
        pool = RewardPool(plan.reward, plan.config.reward.num_workers)
        stack.callback(pool.close)
        start = plan.first_step - 1
        await wait_for_update(plan.run, start)
        published = read_manifest(Path(plan.resolved.lora_sync_path) / adapter_name(start), verify_hash=False).target_modules
        ready = await stack.enter_async_context(
            ready_engines(plan, keepers, supervisor, started_for=modules, wanted=published, say=progress.screen.say)
        )
        progress.event("engines_ready")
        engines = Engines(ready, tolerance)
        await run_steps(Session(plan=plan, engines=engines, scorer=pool, tokenizer=tokenizer, progress=progress, limit=limit))
        await supervisor.wait_exit(TRAINER)


def _trainer_spec(plan: RunPlan, resume: bool) -> ProcessSpec:
    trainer = plan.config.trainer
    return ProcessSpec(
        name=TRAINER,
        argv=trainer_command(plan.run.root, trainer.num_ranks, resume=resume),
        env=trainer_env(trainer.num_threads or max(1, cpu_cores() // trainer.num_ranks)),
        log_path=plan.run.log_path(TRAINER),
        is_done=plan.run.update_path(plan.config.num_steps).exists,
    )


async def _first_of(work: Coroutine[Any, Any, None], supervisor: Supervisor, stop: asyncio.Event) -> bool:
    """The work's end, a child's death or a stop, whichever comes first; True when the work is done."""
    running, watching, stopping = (asyncio.ensure_future(x) for x in (work, supervisor.watch(), stop.wait()))
    try:
        await asyncio.wait({running, watching, stopping}, return_when=asyncio.FIRST_COMPLETED)
        if running.done() and isinstance(running.exception(), RunFailed):
            await asyncio.wait({watching}, timeout=FAILURE_GRACE_S)
        if watching.done():
            watching.result()
        if running.done():
            running.result()
        return running.done()
    finally:
        for task in (running, watching, stopping):
            task.cancel()
        await asyncio.gather(running, watching, stopping, return_exceptions=True)


async def _stop_trainer(plan: RunPlan, supervisor: Supervisor) -> None:
    """Ask the trainer for a checkpoint and its end; the supervisor ends what is left."""
    plan.run.stop_path.touch()
    with contextlib.suppress(asyncio.TimeoutError, ChildDied):
        await asyncio.wait_for(supervisor.wait_exit(TRAINER), STOP_GRACE_S)


def _explained(plan: RunPlan, error: SkyliteError) -> SkyliteError:
    """The error with the rank's own reason where the trainer left one, and with what was kept."""
    if isinstance(error, ChildDied) and plan.run.trainer_error_path.exists():
        reason = plan.run.read_json(plan.run.trainer_error_path)
        error = RunFailed(f"The trainer stopped: {reason['what']}", str(reason["hint"]))
    elif isinstance(error, ChildDied) and error.what.startswith(TRAINER) and "Traceback" not in error.log_tail:
        killed = "A rank ended without an error of its own: it was killed, by hand or by the kernel for lack of memory."
        error = ChildDied(f"{error.what} {killed}", error.hint, error.log_tail)
    error.args = (f"{error}\n{stopped_text(plan.run, Path(plan.resolved.lora_sync_path))}",)
    return error


def _stop_event(stop: asyncio.Event) -> asyncio.Event:
    """The event, set by Ctrl-C or SIGTERM too."""
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    return stop
