"""Start the resources of a run (screen, loggers, engines, trainer, rollout source), run all steps, clean up.

Consumes: a checked plan, in folders that the caller has locked. Waits for: engines and trainer to start, the
loop, the trainer's end. Produces: the session that the loop uses. Unblocks: the trainer, by the canary that
it scores at each publish.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import secrets
import time
import uuid
from collections.abc import AsyncIterator, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any, Protocol

from skylite.adapters.experts import served_modules
from skylite.adapters.manifest import CanaryImage, read_manifest
from skylite.adapters.target_modules import last_names, predict_modules
from skylite.config.provenance import Provenance, Typed
from skylite.data.chat_tokenizer import ChatTokenizer, load_tokenizer, prompt_size, run_template
from skylite.engine.canary import DEFAULT_TOLERANCE, canary_sequences, verify_folder, with_picture
from skylite.engine.engine_pool import EnginePool, LeftOut
from skylite.engine.launchers import load_launcher
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.start_engines import (
    TeacherEngine,
    engines_for_modules,
    engines_kept_alive,
    start_engines,
    teacher_engine,
)
from skylite.engine.url_engines import UrlEngines, UrlWatchdog, url_specs
from skylite.engine.watchdog import RestartPolicy, Watchdog
from skylite.environments.judge import judge_running
from skylite.environments.offline_source import Offline
from skylite.environments.source import GroupRequest
from skylite.environments.teacher_server import teacher_running
from skylite.errors import (
    ConfigError,
    OutOfMemory,
    SkyliteError,
    TrainerLost,
    WriteFailed,
    convert_os_errors,
    write_failed,
)
from skylite.loggers.logger_processes import LoggerProcess, start_loggers
from skylite.processes.child import Supervisor, poll
from skylite.processes.file_tree import remove_tree
from skylite.processes.hosts import TrainerStart
from skylite.progress_reporting import long_work
from skylite.report.read_run import read_facts
from skylite.rollout.failures import TRAINER, explain_failure, may_resume, with_next_commands
from skylite.rollout.loop import TrainerStep, run_steps, wait_for_trainer_step
from skylite.rollout.measured_placement import MeasuredPlacement
from skylite.rollout.plan import RunPlan, write_config
from skylite.rollout.resume import plan_resume, remove_after
from skylite.rollout.session import Progress, Session, StepWatch, TimeLimit, prompt_history
from skylite.rollout.shutdown import (
    TRAINER_SHARE,
    StopRequest,
    ask_trainer_to_end,
    handle_signals,
    run_until_stopped,
)
from skylite.rollout.sources import source_for
from skylite.rollout.trainer_process import trainer_process
from skylite.run.files import sha256_file, temporary_sibling, write_json
from skylite.run.host_places import announce
from skylite.run.metrics_file import null_to_nan, read_metrics
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import adapter_name
from skylite.ui.dashboard import Screen
from skylite.ui.end_message import finished_text, log_findings, stopped_text

logger = logging.getLogger(__name__)
LONGEST_PROMPTS = 16
"""Prompts to encode for the longest one. The longest text need not have the most tokens."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Start:
    """One start of a run: what its processes need."""

    plan: RunPlan
    resume: bool
    supervisor: Supervisor
    progress: Progress
    left_out: LeftOut = field(default_factory=LeftOut)
    """Engines of engine.urls."""

    @property
    def tolerance(self) -> float | None:
        """Of the canary."""
        config = self.plan.config
        return config.sync.canary_tolerance or DEFAULT_TOLERANCE[self.plan.resolved.placement.dtype]


class Processes(Protocol):
    """Engines and trainer of a run: its own, or those that the runs of a sweep share."""

    @property
    def owner(self) -> str:
        """See `AdapterVersion`."""

    async def start(self, start: Start, stack: contextlib.AsyncExitStack) -> None:
        """Start engines and trainer, or join them."""

    async def engines(self, start: Start, stack: contextlib.AsyncExitStack) -> Sequence[RetryingEngine]:
        """The engines, once they serve the modules of the trainer's first adapter."""

    async def trainer_exit(self, supervisor: Supervisor) -> None:
        """Wait until the trainer is done with the run."""

    async def leave(self, start: Start, stop: StopRequest) -> None:
        """After the run's end, however it ended: leave what others use. A supervisor ends the rest."""


class OwnProcesses:
    """Engines and trainer of this run alone."""

    def __init__(self) -> None:
        self.owner = ""
        self._watchdogs: list[Watchdog] = []
        self._modules: list[str] = []

    async def start(self, start: Start, stack: contextlib.AsyncExitStack) -> None:
        """Start both at once. Engines that sleep start later, on what the waiting trainer leaves."""
        plan = start.plan
        if not plan.config.engine.lends:
            modules = last_names(predict_modules(plan.resolved.model.path, plan.config.lora)[1])
            await self._start_engines(start, stack, modules)
        start_trainer(start, start.supervisor)

    async def _start_engines(
        self, start: Start, stack: contextlib.AsyncExitStack, modules: list[str]
    ) -> None:
        plan, supervisor, progress = start.plan, start.supervisor, start.progress
        self._modules = modules
        restarts = RestartPolicy(
            config=plan.config.engine,
            verify=partial(verify_folder, tolerance=start.tolerance),
            counts=progress.restarts,
        )
        launcher = load_launcher(plan.config, plan.resolved.trust.programs)
        starting = start_engines(
            launcher, plan.run_config, plan.run.logs, self._modules, supervisor, restarts
        )
        self._watchdogs = await stack.enter_async_context(starting)
        progress.event("engines_started")

    async def engines(self, start: Start, stack: contextlib.AsyncExitStack) -> Sequence[RetryingEngine]:
        wanted = published_modules(start.plan)
        if start.plan.config.engine.lends:
            await self._start_engines(start, stack, wanted)
        return await stack.enter_async_context(
            engines_for_modules(
                start.plan.run_config,
                start.plan.run.logs,
                self._watchdogs,
                start.supervisor,
                started_for=self._modules,
                wanted=wanted,
            )
        )

    async def trainer_exit(self, supervisor: Supervisor) -> None:
        await supervisor.wait_exit(TRAINER)

    async def leave(self, start: Start, stop: StopRequest) -> None:
        """The supervisor ends them."""


class UrlProcesses(OwnProcesses):
    """A trainer of this run alone, beside the engines of engine.urls."""

    async def start(self, start: Start, stack: contextlib.AsyncExitStack) -> None:
        # These engines outlive the run, and each start may publish its versions again, with other bits.
        self.owner = secrets.token_hex(4)
        start_trainer(start, start.supervisor)

    async def engines(self, start: Start, stack: contextlib.AsyncExitStack) -> Sequence[RetryingEngine]:
        plan = start.plan
        every = UrlEngines(
            launcher=load_launcher(plan.config, plan.resolved.trust.programs),
            run_config=plan.run_config,
            verify=partial(verify_folder, tolerance=start.tolerance),
            left_out=start.left_out,
            on_change=start.progress.engine_changed,
        )
        specs = url_specs(plan.run_config, published_modules(plan))
        watchdogs = [UrlWatchdog(spec, index, every) for index, spec in enumerate(specs)]
        engines = await stack.enter_async_context(engines_kept_alive(watchdogs, start.supervisor))
        stack.push_async_callback(every.unload_all)
        return engines


async def run_session(
    plan: RunPlan,
    *,
    resume: bool,
    limit: TimeLimit | None = None,
    processes: Processes | None = None,
    screen: Screen | None = None,
    stop: StopRequest | None = None,
) -> bool:
    """Run all steps, in folders that the caller has locked. Raises RunFailed subclasses.

    Returns whether the run got to the session's last step: False after a clean stop, by a signal or by
    `limit`.

    If the trainer is lost, the run resumes from its last checkpoint (trainer.max_restarts). The engines
    restart too: they key their prefix cache by adapter name, and the same versions are written again. So does
    a run with placement=auto, once, if another placement is faster.

    Only a run of a sweep gets `processes`, a `screen` and a `stop`.
    """
    adapters = plan.resolved.identity.lora_sync_path
    stop = stop or handle_signals(limit.stop if limit is not None else asyncio.Event())
    placement = MeasuredPlacement(stop)
    watches: list[StepWatch] = [limit, placement] if limit is not None else [placement]
    processes = processes or (UrlProcesses() if plan.config.engine.urls else OwnProcesses())
    async with contextlib.AsyncExitStack() as stack:
        screen = stack.enter_context(screen or Screen(plan.config.num_steps))
        await stack.enter_async_context(loggers_running(plan, stop))
        restarts: dict[str, int] = {}
        while True:
            roll_back(plan, adapters) if resume else clear_control_files(plan)
            chosen: Mapping[str, Any] = {}
            screen.state.history = tuple(null_to_nan(m) for m in read_metrics(plan.run.metrics_path))
            try:
                finished = await _supervised(plan, screen, processes, resume, watches, restarts, stop)
                if finished or not stop.take_back():
                    return finished
                chosen = placement.settings
            except TrainerLost as error:
                if not may_resume(plan, error, restarts.get(TRAINER, 0), stop.requested.is_set()):
                    raise
                allowed = ""
                if not isinstance(error, OutOfMemory):
                    restarts[TRAINER] = restarts.get(TRAINER, 0) + 1
                    allowed = (
                        f" (restart {restarts[TRAINER]} of "
                        f"trainer.max_restarts={plan.config.trainer.max_restarts})"
                    )
                logger.warning(f"{error.what} The run resumes from its last checkpoint{allowed}.")
            plan, resume = replace(resumed_with(plan, chosen), pause_after=plan.pause_after), True


def resumed_with(plan: RunPlan, settings: Mapping[str, Any]) -> RunPlan:
    """The run from its last checkpoint; with these settings, if it fits with them on the machine of now."""
    if settings:
        typed = {name: Typed(value, "--set") for name, value in settings.items()}
        try:
            return plan_resume(plan.run, Provenance(typed=typed))
        except ConfigError as error:
            logger.warning(f"{error.what} The run keeps its placement.")
    return plan_resume(plan.run)


def clear_control_files(plan: RunPlan) -> None:
    """Remove the stop request, the trainer's error and turn, and the rendezvous of an earlier attempt."""
    with convert_os_errors(plan.run.root):
        plan.run.stop_path.unlink(missing_ok=True)
        plan.run.trainer_error_path.unlink(missing_ok=True)
        plan.run.trainer_turn_path.unlink(missing_ok=True)
    old = temporary_sibling(plan.run.rendezvous)
    with convert_os_errors(plan.run.rendezvous):  # a new one, so that it is a folder that this user owns
        with contextlib.suppress(FileNotFoundError):
            os.rename(plan.run.rendezvous, old)
        plan.run.rendezvous.mkdir(mode=0o700)
    remove_tree(old)  # it may hold another machine's files that this one does not see yet: then it stays


def roll_back(plan: RunPlan, adapters: Path) -> None:
    """Restore the run directory to the checkpoint from which the plan resumes."""
    clear_control_files(plan)
    write_config(plan)
    remove_after(plan.run, adapters, plan.first_step - 1, reuse_rollouts=plan.reuse_rollouts)


async def _supervised(
    plan: RunPlan,
    screen: Screen,
    processes: Processes,
    resume: bool,
    watches: Sequence[StepWatch],
    restarts: dict[str, int],
    stop: StopRequest,
) -> bool:
    """Run under a supervisor until the run is done, stopped or failed."""
    adapters = plan.resolved.identity.lora_sync_path
    end_s = plan.config.stop.grace_s * (1 - TRAINER_SHARE)
    async with Supervisor(stop_timeout_s=end_s, skip_wait=stop.forced.is_set) as supervisor:
        done = plan.first_step - 1
        progress = Progress(
            plan.run,
            plan.config.num_steps,
            screen,
            supervisor.pids,
            step=done,
            recorded=done,
            restarts=restarts,
        )
        try:
            start = Start(plan=plan, resume=resume, supervisor=supervisor, progress=progress)
            trainer_exit = partial(processes.trainer_exit, supervisor)
            try:
                work = _run(start, processes, watches)
                finished = await run_until_stopped(work, plan, supervisor, progress, stop, trainer_exit)
            finally:
                await processes.leave(start, stop)
        except (SkyliteError, OSError) as error:
            reason = explain_failure(
                plan, write_failed(error) if isinstance(error, OSError) else error, supervisor
            )
            if may_resume(plan, reason, restarts.get(TRAINER, 0), stop.requested.is_set()):
                raise reason from None
            reason = with_next_commands(plan, reason)
            # If status.json cannot be written either, the user must still see why the run ended.
            with contextlib.suppress(WriteFailed):
                progress.phase("failed", error=str(reason))
            raise reason from None
    if finished and plan.last_step < plan.config.num_steps:
        text = f"at step {plan.last_step}, to wait for other policies of its sweep"
        progress.phase("stopped", text, error=text)
        return True
    if stop.continues and not finished:
        progress.phase("stopped", "to continue with another placement")
        return False
    progress.phase("done" if finished else "stopped")
    facts = read_facts(plan.run.root)
    log_findings(facts)
    logger.info(
        finished_text(plan.run, adapters, facts.held_out) if finished else stopped_text(plan.run, adapters)
    )
    return finished


async def _run(start: Start, processes: Processes, watches: Sequence[StepWatch]) -> None:
    """Start engines, trainer and reward workers side by side, then run every step."""
    async with contextlib.AsyncExitStack() as stack:
        await _run_in(stack, start, processes, watches)


async def _run_in(
    stack: contextlib.AsyncExitStack, start: Start, processes: Processes, watches: Sequence[StepWatch]
) -> None:
    plan, supervisor, progress = start.plan, start.supervisor, start.progress
    progress.event("run_started")
    progress.phase(
        "starting",
        f"{plan.config.engine.count} engine(s); trainer: {plan.config.trainer.num_ranks} rank(s)",
    )
    plan.run.canary_path.unlink(missing_ok=True)  # the trainer waits for the new one
    plan.run.held_out_path.unlink(missing_ok=True)
    await processes.start(start, stack)
    progress.event("trainer_started")
    tokenizer = await start_tokenizer(plan, stack)
    progress.event("tokenizer_ready")
    judge = await stack.enter_async_context(judge_running(plan.config, tokenizer, plan.run.logs))
    teacher = await stack.enter_async_context(
        teacher_running(
            plan.config.algorithm,
            tokenizer,
            is_new=not plan.resumed,
            engine=await teacher_engine_of(start, stack),
        )
    )
    running = source_for(plan.config).running(
        plan.scored, tokenizer, plan.resolved.model.path, plan.run.logs, supervisor, judge
    )
    source = await stack.enter_async_context(running)
    record_choices(plan, await wait_for_trainer_step(plan, plan.first_step - 1))
    engines = await processes.engines(start, stack)
    progress.event("engines_ready")
    session = Session(
        plan=plan,
        engines=EnginePool(engines, start.tolerance, left_out=start.left_out),
        source=source,
        judge=judge,
        teacher=teacher,
        history=prompt_history(plan),
        progress=progress,
        watches=watches,
        owner=processes.owner,
    )
    if await run_steps(session) < plan.config.num_steps:
        ask_trainer_to_end(plan.run)
    await wait_for_trainer_exit(plan, processes.trainer_exit(supervisor))


async def teacher_engine_of(start: Start, stack: contextlib.AsyncExitStack) -> TeacherEngine | None:
    """Start the engine of a teacher that is a whole model, and wait until it serves. None: there is none."""
    plan = start.plan
    if plan.resolved.teacher is None:
        return None
    launcher = load_launcher(plan.config, plan.resolved.trust.programs)
    starting = teacher_engine(
        launcher, plan.run_config, plan.run.logs, start.supervisor, start.progress.restarts
    )
    return await stack.enter_async_context(starting)


def record_choices(plan: RunPlan, first: TrainerStep) -> None:
    """Print which shortcuts the trainer chose for the model, and add them to config.json."""
    if first.choices:
        short = ", ".join(choice.partition(";")[0] for choice in first.choices)
        logger.info(f"trainer: {short} (config.json has the reasons)")
    write_config(replace(plan, resolved=plan.resolved.model_copy(update={"choices": first.choices})))


def published_modules(plan: RunPlan) -> list[str]:
    """Names of the modules that the adapter of the first step changes."""
    adapter = plan.resolved.identity.lora_sync_path / adapter_name(plan.first_step - 1)
    manifest = read_manifest(adapter, verify_hash=False)
    return last_names(served_modules(manifest.target_modules, manifest.target_parameters))


async def wait_for_trainer_exit(plan: RunPlan, exited: Coroutine[Any, Any, None]) -> None:
    """Wait until the trainer ends after its last step. Raises ChildDied; TrainerLost if it hangs."""
    timeout_s = plan.config.trainer.step_timeout_s
    try:
        await asyncio.wait_for(exited, timeout_s)
    except TimeoutError:
        raise TrainerLost(
            f"The trainer did not end within {timeout_s:g} s (trainer.step_timeout_s) "
            "after its last step: it hangs."
        ) from None


def start_trainer(start: Start, supervisor: Supervisor) -> None:
    """Start the ranks of this machine, and let the others know."""
    plan, trainer = start.plan, start.plan.config.trainer
    begun = TrainerStart(uuid.uuid4().hex, start.resume, sha256_file(plan.run.config_path))
    if trainer.hosts > 1:
        announce(plan.run.rendezvous, begun)
        logger.info(
            f"{trainer.hosts} machines train together: on each of the others, run "
            f"`skylite worker --join {plan.run.root}`"
        )
    supervisor.start(trainer_process(plan.run, plan.run_config, begun))


async def start_tokenizer(plan: RunPlan, stack: contextlib.AsyncExitStack) -> ChatTokenizer:
    """Load the tokenizer and write the canary sequences, for which the trainer waits. `stack` closes it.

    The trainer finds the rows that it scores itself when it finds the canary.
    """
    tokenizer = await asyncio.to_thread(
        load_tokenizer, plan.resolved.model.path, run_template(plan.run_config)
    )
    stack.callback(tokenizer.close)
    if tokenizer.note:
        logger.info(tokenizer.note)
    longest = await asyncio.to_thread(longest_prompt_tokens, tokenizer, plan)
    sequences = await asyncio.to_thread(
        canary_sequences, tokenizer, plan.train, plan.resolved.placement.dtype
    )
    if plan.config.source.name == "offline" and plan.held_out:
        rows = Offline(plan.config, tokenizer)
        request = GroupRequest(model="", version=0, engines=[], temperature=1.0)
        write_rollouts(plan.run.held_out_path, await rows.sample(plan.held_out, request))
    canary: dict[str, Any] = {"sequences": sequences, "longest_prompt_tokens": longest}
    if plan.config.lora.unfrozen:
        canary["sequences"], image = await asyncio.to_thread(with_picture, tokenizer, sequences)
        canary["image"] = CanaryImage.of(image).model_dump(mode="json")
    write_json(plan.run.canary_path, canary)
    return tokenizer


def longest_prompt_tokens(tokenizer: ChatTokenizer, plan: RunPlan) -> int:
    """Tokens of the longest training prompt that is sampled, judged by the prompts with the longest text."""
    by_size = sorted(plan.train, key=prompt_size, reverse=True)
    tokens = map(len, tokenizer.encode_chats(by_size[:LONGEST_PROMPTS]))
    limit = plan.config.rollout.max_prompt_tokens
    return max((count for count in tokens if count <= limit), default=limit)


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
                await _finish(processes, stop, plan.config.stop.grace_s)
        finally:
            for process in processes:
                process.end()


async def _watch(processes: Sequence[LoggerProcess]) -> None:
    """Report every logger that fails."""
    while True:
        for process in processes:
            process.report(process.failure())
        await asyncio.sleep(WATCH_S)


async def _finish(processes: Sequence[LoggerProcess], stop: StopRequest, grace_s: float) -> None:
    for process in processes:
        process.finish()
    limit_s = stop.remaining_s(grace_s) if stop.requested.is_set() else FINISH_S
    until = time.monotonic() + limit_s
    names = ", ".join(process.name for process in processes)
    with long_work(f"waiting for {names} to finish, {limit_s:.0f} s at most"):
        while any(poll(p.child) is None for p in processes) and not stop.forced.is_set():
            if time.monotonic() > until:
                break
            await asyncio.sleep(POLL_S)
    for process in processes:
        is_late = poll(process.child) is None
        process.report("it did not end in time" if is_late else process.failure())
