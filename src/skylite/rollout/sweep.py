"""Run the policies of a sweep: each is a run of its own, on engines and a trainer that all share.

Consumes: the checked plans, in folders that the caller has locked. Waits for: every run. Produces: what each
run produces. Unblocks: the shared trainer, by the order to take a run.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import signal
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Literal

from skylite.adapters.target_modules import last_names, predict_modules
from skylite.engine.canary import DEFAULT_TOLERANCE, verify_folder
from skylite.engine.interface import EngineSpec
from skylite.engine.launchers import load_launcher
from skylite.engine.model_sizes import model_sizes
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.start_engines import engines_kept_alive, start_engines
from skylite.engine.watchdog import RestartPolicy
from skylite.errors import ChildDied, RunFailed, SkyliteError, convert_os_errors
from skylite.processes.child import Child, ProcessSpec, Supervisor, child_died, poll
from skylite.processes.file_tree import remove_tree
from skylite.processes.hardware import threads_per_rank
from skylite.processes.hosts import TrainerStart
from skylite.processes.torchrun import trainer_command, trainer_env
from skylite.report.alarms import find_alarms
from skylite.report.read_run import read_facts
from skylite.rollout.failures import TRAINER, explain_death, failures_recorded, record_leaving
from skylite.rollout.halving import Halving
from skylite.rollout.plan import RunPlan
from skylite.rollout.run_session import Start, published_modules, run_session
from skylite.rollout.shutdown import StopRequest, ask_trainer_to_end, on_signals
from skylite.run.checkpoint_folder import choose_checkpoint
from skylite.run.files import write_json
from skylite.run.metrics_file import held_out_scores
from skylite.run.sweep_dir import SweepDir
from skylite.ui.logs import member_log
from skylite.ui.sweep_screen import MemberScreen, SweepScreen

logger = logging.getLogger(__name__)
POLL_S = 0.05
WATCH_S = 0.5
TRAINER_END_S = 20.0
LOOKS = 20
"""A run is searched for a collapse each time it has grown by a part of this many."""


@dataclass(frozen=True, slots=True)
class End:
    """How a policy ended in this process."""

    how: Literal["done", "left", "stopped", "failed"]
    """left: before its last step, for good. stopped: with the whole sweep; a resume continues it."""
    why: str = ""

    def __str__(self) -> str:
        return f"{self.how}: {self.why}" if self.why else self.how


@dataclass(slots=True)
class Member:
    """A policy of the sweep."""

    name: str
    plan: RunPlan
    screen: MemberScreen
    stop: StopRequest
    starts: int = 0
    """How often it has joined the trainer."""
    seen: int = 0
    """Steps at the last search for a collapse."""

    def end(self, sweep: SweepDir) -> End:
        """After a clean stop."""
        if why := sweep.why_left(self.name):
            record_leaving(self.plan, why)
            self.screen.state.phase = "left"
            return End("left", why)
        return End("stopped")


@dataclass(slots=True)
class SharedProcesses:
    """The engines and the trainer, and the supervisors of the runs that use them now."""

    sweep: SweepDir
    plan: RunPlan
    """Of the largest policy; all others fit where it does."""
    modules: list[str]
    """That the engines were started for."""
    supervisor: Supervisor
    engines: asyncio.Future[Sequence[RetryingEngine]]
    running: dict[str, Start] = field(default_factory=dict)
    trainer: Child | None = None

    def start_trainer(self) -> None:
        """Start the trainer, unless it runs."""
        if self.trainer is not None:
            if poll(self.trainer) is None:
                return
            self.supervisor.stop_child(TRAINER)
        shared, config = self.sweep.shared, self.plan.config
        with convert_os_errors(shared.root):
            shared.stop_path.unlink(missing_ok=True)
            shared.trainer_error_path.unlink(missing_ok=True)
            for folder in (shared.rendezvous, self.sweep.orders, self.sweep.left):
                if problem := remove_tree(folder):
                    raise problem
                folder.mkdir(mode=0o700, parents=True)
        threads = config.trainer.num_threads or threads_per_rank(config.trainer.num_ranks)
        spec = ProcessSpec(
            name=TRAINER,
            argv=trainer_command(
                self.sweep.root,
                shared.rendezvous,
                config.trainer.num_ranks,
                TrainerStart(uuid.uuid4().hex, resume=False),
                sweep=True,
            ),
            env=trainer_env(threads, self.plan.resolved.placement.rank_gpus),
            log_path=shared.log_path(TRAINER),
            own_network=not config.shared_network,
        )
        self.trainer = self.supervisor.start(spec)
        self.supervisor.leave_to_caller(TRAINER)

    @property
    def trainer_is_alive(self) -> bool:
        return self.trainer is not None and poll(self.trainer) is None

    def has_left(self, name: str) -> bool:
        """Whether the trainer has let the run go."""
        return (self.sweep.left / name).exists()

    async def watch_trainer(self) -> None:
        """Tell a run why the trainer let it go, and all runs if the trainer dies."""
        while True:
            await asyncio.sleep(POLL_S)
            if self.trainer is not None and not self.trainer_is_alive:
                died, log = child_died(self.trainer), self.supervisor.recent_log(TRAINER)
                for start in self.running.values():  # an error each: a run adds its own next commands
                    start.supervisor.fail(explain_death(self.sweep.shared, died, log))
                self.running.clear()
            for name, start in list(self.running.items()):
                if self.has_left(name) and start.plan.run.trainer_error_path.exists():
                    log = f"Its log is {self.sweep.shared.log_path(TRAINER)}."
                    start.supervisor.fail(ChildDied("The trainer gave this run up.", log, "", TRAINER))
                    del self.running[name]


class MemberProcesses:
    """`run_session.Processes` of a run on the shared ones."""

    def __init__(self, shared: SharedProcesses, member: Member) -> None:
        self._shared, self._member = shared, member

    @property
    def owner(self) -> str:
        """Each start publishes its versions again, perhaps with other bits, so it has its own names."""
        return f"{self._member.name}.{self._member.starts}"

    async def start(self, start: Start, stack: contextlib.AsyncExitStack) -> None:
        name, sweep = self._member.name, self._shared.sweep
        self._member.starts += 1
        self._shared.start_trainer()
        (sweep.left / name).unlink(missing_ok=True)
        write_json(sweep.orders / f"{name}.json", {"root": str(start.plan.run.root), "resume": start.resume})
        self._shared.running[name] = start

    async def engines(self, start: Start, stack: contextlib.AsyncExitStack) -> Sequence[RetryingEngine]:
        engines = await asyncio.shield(self._shared.engines)
        if engines and (extra := set(published_modules(start.plan)) - set(self._shared.modules)):
            raise RunFailed(
                f"The adapter is on {', '.join(sorted(extra))}, and the engines were started for LoRA on "
                f"{', '.join(self._shared.modules)} alone.",
                "Train this policy without a sweep.",
            )
        return engines

    async def trainer_exit(self, supervisor: Supervisor) -> None:
        while not self._shared.has_left(self._member.name):
            await asyncio.sleep(POLL_S)

    async def leave(self, start: Start, stop: StopRequest) -> None:
        name, shared = self._member.name, self._shared
        order = shared.sweep.orders / f"{name}.json"
        if shared.trainer_is_alive and not shared.has_left(name) and not stop.forced.is_set():
            if order.exists():
                order.unlink(missing_ok=True)
            else:
                ask_trainer_to_end(start.plan.run)
                while shared.trainer_is_alive and not shared.has_left(name) and not stop.forced.is_set():
                    await asyncio.sleep(POLL_S)
        shared.running.pop(name, None)
        if shared.engines.done() and not shared.engines.exception() and not stop.forced.is_set():
            for engine in shared.engines.result():
                own = [x for x in engine.adapters if x.startswith(f"{self.owner}:")]
                with contextlib.suppress(SkyliteError):
                    await asyncio.gather(*map(engine.unload_adapter, own))


async def run_sweep(halving: Halving, plans: Mapping[str, RunPlan], together: int) -> dict[str, End]:
    """Run all policies, `together` at once, in folders that the caller has locked.

    Returns for each how it ended. Raises SkyliteError if the engines fail.
    """
    sweep = halving.sweep
    members = [
        Member(name, plan, MemberScreen(plan.config.num_steps), StopRequest(asyncio.Event()))
        for name, plan in plans.items()
    ]

    def stop_all(number: int) -> None:
        for member in members:
            member.stop.on_signal(number)

    on_signals(stop_all)
    grace_s = members[0].plan.config.stop.grace_s
    with SweepScreen({m.name: m.screen.state for m in members}):
        async with (
            Supervisor(grace_s, lambda: any(m.stop.forced.is_set() for m in members)) as supervisor,
            contextlib.AsyncExitStack() as stack,
        ):
            shared = await _start_shared(sweep, list(plans.values()), supervisor, stack)
            return await _run_members(shared, members, halving, together)


def largest_plan(plans: Iterable[RunPlan]) -> RunPlan:
    """The one with the most LoRA parameters: a grid has one with the highest rank on the most modules."""

    def parameters(plan: RunPlan) -> int:
        sizes = model_sizes(plan.resolved.model.path, plan.config.lora, plan.config.critic_lora)
        return sizes.lora + sizes.critic_lora

    return max(plans, key=parameters)


async def _start_shared(
    sweep: SweepDir, plans: Sequence[RunPlan], supervisor: Supervisor, stack: contextlib.AsyncExitStack
) -> SharedProcesses:
    """Start the engines, for the modules and sizes of all policies; the trainer starts with the first run."""
    largest = largest_plan(plans)
    of_plans = [predict_modules(plan.resolved.model.path, plan.config.lora)[1] for plan in plans]
    modules = last_names({module for of_plan in of_plans for module in of_plan})
    tolerance = largest.config.sync.canary_tolerance or DEFAULT_TOLERANCE[largest.resolved.placement.dtype]
    restarts = RestartPolicy(
        config=largest.config.engine, verify=partial(verify_folder, tolerance=tolerance), counts={}
    )
    launcher = load_launcher(largest.config, largest.resolved.trust.programs)

    def for_all(spec: EngineSpec) -> EngineSpec:
        return replace(
            spec,
            max_model_len=max(plan.config.engine_sequence_tokens for plan in plans),
            max_num_seqs=max(plan.config.engine.max_num_seqs for plan in plans),
            max_images=max(plan.resolved.model.max_images for plan in plans),
        )

    watchdogs = await stack.enter_async_context(
        start_engines(launcher, largest.run_config, sweep.shared.logs, modules, supervisor, restarts, for_all)
    )
    ready: asyncio.Future[Sequence[RetryingEngine]] = asyncio.get_running_loop().create_future()

    async def serve() -> None:
        try:
            async with engines_kept_alive(watchdogs, supervisor) as engines:
                ready.set_result(engines)
                await asyncio.Event().wait()
        except SkyliteError as error:
            if not ready.done():
                ready.set_exception(error)

    task = asyncio.create_task(serve())
    stack.push_async_callback(_ended, task)
    return SharedProcesses(sweep, largest, modules, supervisor, ready)


async def _ended(task: asyncio.Task[None]) -> None:
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)


async def _run_members(
    shared: SharedProcesses, members: Sequence[Member], halving: Halving, together: int
) -> dict[str, End]:
    free = asyncio.Semaphore(together)
    tasks = {m.name: asyncio.create_task(_run_member(shared, m, halving, free)) for m in members}
    helpers = [
        asyncio.create_task(work)
        for work in (shared.watch_trainer(), _watch_engines(shared, members), _watch_members(shared, members))
    ]
    try:
        await asyncio.wait(tasks.values())
    finally:
        for task in (*helpers, *tasks.values()):
            task.cancel()
        await asyncio.gather(*helpers, *tasks.values(), return_exceptions=True)
    if shared.trainer_is_alive:
        ask_trainer_to_end(shared.sweep.shared)
        with contextlib.suppress(ChildDied, TimeoutError):
            await asyncio.wait_for(shared.supervisor.wait_exit(TRAINER), TRAINER_END_S)
    return {name: task.result() for name, task in tasks.items()}


async def _run_member(
    shared: SharedProcesses, member: Member, halving: Halving, free: asyncio.Semaphore
) -> End:
    """Run one policy from rung to rung. Whatever ends it ends no other."""
    try:
        with failures_recorded(member.plan), member_log(member.name, member.plan.run.log_path("skylite")):
            end = await _to_its_end(shared, member, halving, free)
    except SkyliteError as error:
        logger.warning(f"{member.name} leaves the sweep: {error.what}")
        member.screen.state.phase = "failed"
        end = End("failed", error.what)
    if end.how != "stopped":  # with all others, of which none may be judged as if this one had failed
        halving.active.discard(member.name)
    return end


async def _to_its_end(
    shared: SharedProcesses, member: Member, halving: Halving, free: asyncio.Semaphore
) -> End:
    name, config = member.name, member.plan.config
    for rung in halving.rungs:
        if not halving.has(name, rung):
            scores = held_out_scores(member.plan.run, config.eval)
            if member.plan.first_step <= rung or rung not in scores:
                if not await _train_to(shared, member, rung, free):
                    return member.end(shared.sweep)
                scores = held_out_scores(member.plan.run, config.eval)
            halving.record(name, rung, scores[rung])
        why = await _verdict(member, halving, rung)
        if why:
            logger.info(f"leaves the sweep: {why}")
            shared.sweep.leave(name, why)
        if why != "":
            return member.end(shared.sweep)
    is_done = await _train_to(shared, member, config.num_steps, free)
    return End("done") if is_done else member.end(shared.sweep)


async def _verdict(member: Member, halving: Halving, rung: int) -> str | None:
    """Why the policy leaves at the rung, empty if it stays; None after a stop. Waits while that is open."""
    score = halving.scores[rung][member.name]
    if halving.verdict(member.name, rung) is None:
        member.screen.phase("waiting", f"at step {rung}, with a held-out score of {score:.4g}")
    while (why := halving.verdict(member.name, rung)) is None and not member.stop.requested.is_set():
        await asyncio.sleep(POLL_S)
    return None if member.stop.requested.is_set() else why


async def _train_to(shared: SharedProcesses, member: Member, step: int, free: asyncio.Semaphore) -> bool:
    """Train a policy up to a step, when there is a place for it. Returns False after a stop."""
    async with free:
        if member.stop.requested.is_set():
            return False
        plan = replace(member.plan, pause_after=step)
        is_there = await run_session(
            plan,
            resume=plan.resumed,
            processes=MemberProcesses(shared, member),
            screen=member.screen,
            stop=member.stop,
        )
    if is_there and step < plan.config.num_steps:
        first = choose_checkpoint(plan.run, None) + 1
        member.plan = replace(member.plan, first_step=first, resumed=True, reuse_rollouts=True)
    return is_there


async def _watch_engines(shared: SharedProcesses, members: Sequence[Member]) -> None:
    """End all runs if an engine fails for good."""
    try:
        await shared.supervisor.watch()
    except SkyliteError as error:
        for member in members:
            if member.name not in shared.running:
                member.stop.requested.set()
        for start in shared.running.values():
            start.supervisor.fail(RunFailed(error.what, error.hint))
        if not shared.engines.done():
            shared.engines.set_exception(error)


async def _watch_members(shared: SharedProcesses, members: Sequence[Member]) -> None:
    """Let the policies leave after their step that the user has stopped, or that have collapsed."""
    while True:
        await asyncio.sleep(WATCH_S)
        for member in members:
            if member.stop.requested.is_set():
                continue
            if member.name in shared.running and (why := await _collapse(member)):
                shared.sweep.leave(member.name, why)
            if shared.sweep.why_left(member.name):
                member.stop.on_signal(signal.SIGINT)


async def _collapse(member: Member) -> str:
    """The alarm of the report, if the policy has collapsed; else empty."""
    steps = len(member.screen.state.history)
    if steps <= member.seen * (1 + 1 / LOOKS):
        return ""
    member.seen = steps
    facts = await asyncio.to_thread(read_facts, member.plan.run.root)
    alarms = find_alarms(facts.metrics, facts.held_out)
    return next((alarm.text for alarm in alarms if alarm.kind == "collapse"), "")
