"""The step loop of the parent process: sample, hand over to the trainer, load and verify the adapter, record.

Two tasks run side by side. `sample_steps` samples each step once its adapter version is verified, and writes
the rollout file for the trainer. `record_steps` loads and verifies each new adapter and records the step.
On-policy, they take turns. With rollout.max_staleness = 1, the version for step k + 1 is verified before step
k is trained. With 2 or more, `sample_unordered` takes the place of `sample_steps`.

Consumes: adapters and step files of the trainer. Waits for: the trainer's step, the engines' loads.
Produces: rollout files, metrics.jsonl. Unblocks: the trainer, and sampling of the next step.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from skylite.adapters.retention import clean_up
from skylite.config.train import TrainConfig
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.engine_pool import SyncReport
from skylite.environments.source import gather_or_cancel
from skylite.errors import TrainerLost
from skylite.progress_reporting import long_work
from skylite.report.read_run import number
from skylite.rollout.held_out import evaluate_at_start, evaluate_held_out, is_evaluated_after
from skylite.rollout.judge_rollouts import RolloutJudge, mean_gap
from skylite.rollout.plan import RunPlan
from skylite.rollout.prompt_check import unopened_tag
from skylite.rollout.sampling import SampledStep, sample_step, with_teacher
from skylite.rollout.session import Session
from skylite.rollout.step_metrics import (
    Interval,
    StepTimings,
    busy_s,
    completion_view,
    step_metrics,
    trainer_metrics,
)
from skylite.rollout.unordered_steps import Stream, taken_before
from skylite.run.files import write_json
from skylite.run.metrics_file import append_metrics, read_metrics
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name, sampling_version

logger = logging.getLogger(__name__)
POLL_S = 0.02


EQUAL_STEPS = 3
"""Steps without a signal, from which the user is warned; again each time their number has doubled."""


@dataclass(slots=True)
class EqualRewards:
    """Counts the steps in a row whose groups all had equal rewards."""

    steps: int = 0

    def after(self, metrics: Mapping[str, Any]) -> str:
        """Whether to warn after a step with these metrics: the sentence, or empty."""
        share = metrics.get("groups/zero_std_sampled_frac", 0.0)
        has_signal = share is None or share < 1 or "teacher/kl" in metrics
        self.steps = 0 if has_signal else self.steps + 1
        doublings = math.log2(self.steps / EQUAL_STEPS) if self.steps >= EQUAL_STEPS else -1.0
        return self.text(metrics) if doublings >= 0 and doublings.is_integer() else ""

    def text(self, metrics: Mapping[str, Any]) -> str:
        """What is wrong, and where to look."""
        reward = metrics.get("reward/sampled_mean", metrics.get("reward/mean"))
        mean = f", {reward:.3g} on average" if isinstance(reward, float) else ""
        return (
            f"in each of the last {self.steps} steps all rewards within a group were equal{mean}: the policy "
            "learns nothing from them. `skylite samples` shows what the reward got"
        )


@dataclass(frozen=True, slots=True)
class TrainerStep:
    """The trainer's report on a step, whose adapter is published."""

    metrics: dict[str, Any]
    trained: Interval
    """When the trainer computed the step."""
    choices: list[str]
    """The trainer's shortcuts; only after its start."""
    warnings: list[str]
    """Sentences for the user."""
    notes: list[str]
    """What the trainer chose, for the user."""
    rollout_gaps: Mapping[str, Any] = field(default_factory=dict)
    """By depth of context, for judge_rollouts.py."""


@dataclass(slots=True)
class StepQueues:
    """What `sample_steps` and `record_steps` pass to each other."""

    versions: asyncio.Queue[AdapterVersion] = field(default_factory=asyncio.Queue)
    """Verified versions in order, for `sample_steps`."""
    samples: asyncio.Queue[SampledStep | None] = field(default_factory=asyncio.Queue)
    """Steps with a written rollout file, in order, for `record_steps`. None: there is no further step."""
    sampling: dict[int, Interval] = field(default_factory=dict)
    """Step -> when it was sampled; the end is inf until sampling ends."""
    asleep_s: dict[int, float] = field(default_factory=dict)
    """Step -> seconds that the engines took to fall asleep before it is trained."""
    requests: dict[int, Interval] = field(default_factory=dict)
    """Batch -> when engines worked on it. `sample_steps` has a batch a step, with the times above."""


async def run_steps(session: Session) -> int:
    """Run every remaining step, and the evaluations before, between and after the steps.

    Returns the last step: that of the session, or an earlier one if too few prompts are left
    (data.retire_after).
    """
    queues, plan = StepQueues(), session.plan
    await wait_for_trainer_step(plan, plan.first_step - 1)
    versions = initial_versions(session)
    for version in versions:
        adapter, load_s = await load_adapter(session, version)
        await verify_adapter(session, adapter, load_s)
        queues.versions.put_nowait(adapter)
    await evaluate_at_start(session, versions)
    # A run that died after its last step has only the final evaluation left.
    last = plan.last_step
    if plan.first_step <= last:
        is_ordered = plan.config.rollout.max_staleness < 2
        sampler = sample_steps(session, queues) if is_ordered else sample_unordered(session, queues)
        tasks = (sampler, record_steps(session, queues))
        last, _ = await gather_or_cancel([asyncio.create_task(task) for task in tasks])
    await unload_before(session, before=last)
    if last == plan.config.num_steps or last < plan.last_step:  # the run is done, and not at a pause
        await evaluate_held_out(session, "after", version=last)
    return last


async def sample_steps(session: Session, queues: StepQueues) -> int:
    """Sample every step in order, and write its rollout file. Returns the last step."""
    plan, progress = session.plan, session.progress
    source, last = await queues.versions.get(), plan.last_step
    queues.requests = queues.sampling
    for step in range(plan.first_step, last + 1):
        if text := _too_few_prompts(session, step):
            logger.info(text)
            queues.samples.put_nowait(None)
            last = step - 1
            break
        while source.version < sampling_version(step, plan.config.rollout.max_staleness):
            source = await queues.versions.get()
        version, started = source.version, time.monotonic()
        queues.sampling[step] = (started, math.inf)
        progress.event("sampling_started", step=step, version=version)
        # No request uses an older version any more: those belonged to earlier steps.
        sampled, _ = await asyncio.gather(
            sample_step(session, step, source), unload_before(session, before=version)
        )
        queues.sampling[step] = (started, time.monotonic())
        hand_over(session, queues, step, sampled, version)
        if plan.config.engine.lends:
            queues.asleep_s[step] = await lend_memory(session, step)
    # The last version is still to come; the one before it may be evaluated.
    await unload_before(session, before=last - 1)
    return last


def hand_over(session: Session, queues: StepQueues, step: int, sampled: SampledStep, version: int) -> None:
    """Write the rollout file for the trainer, unless an earlier process did."""
    session.progress.event("sampling_ended", step=step, version=version)
    if not sampled.stored:
        write_rollouts(session.plan.run.rollout_path(step), sampled.groups, sampled.batches)
    session.progress.event("rollouts_written", step=step, version=version)
    queues.samples.put_nowait(sampled)


async def lend_memory(session: Session, step: int) -> float:
    """Let the engines sleep, and then the trainer compute the step. Returns the seconds until it may."""
    started = time.monotonic()
    await session.engines.sleep()
    session.progress.event("engines_asleep", step=step)
    write_json(session.plan.run.trainer_turn_path, {"step": step})
    return time.monotonic() - started


async def take_memory_back(session: Session, queues: StepQueues, step: int) -> dict[str, float]:
    """Wake the engines after the step, if they sleep. Returns the metric of what their sleep costs."""
    if step not in queues.asleep_s:
        return {}
    started = time.monotonic()
    await session.engines.wake()
    session.progress.event("engines_awake", step=step)
    return {"time/engine_sleep_s": queues.asleep_s.pop(step) + time.monotonic() - started}


async def sample_unordered(session: Session, queues: StepQueues) -> int:
    """Write the rollout file of every step from the groups that are finished first. Returns the last step."""
    plan, step = session.plan, session.plan.first_step
    newest = await queues.versions.get()
    while plan.run.rollout_path(step).exists() and step <= plan.last_step:
        queues.sampling[step] = (time.monotonic(), time.monotonic())
        hand_over(session, queues, step, await sample_step(session, step, newest), newest.version)
        step += 1
    stream = Stream(session, newest, taken_before(session, step), queues.requests)
    following = asyncio.create_task(stream.follow(queues.versions))
    try:
        # After the last step, versions are still to come, for which older ones make room on the engines.
        while step <= plan.last_step or stream.adapter.version < plan.last_step - 1:
            await unload_before(session, before=stream.oldest)
            stream.start(step)
            if step > plan.last_step or (chosen := stream.take(step)) is None:
                await stream.wait()
                continue
            begins, ends = zip(*(finished.sampled for finished in chosen), strict=True)
            queues.sampling[step] = (min(begins), max(ends))
            sampled = await with_teacher(session, stream.sampled(chosen))
            hand_over(session, queues, step, sampled, min(finished.version for finished in chosen))
            step += 1
    finally:
        following.cancel()
        stream.cancel()
    return plan.last_step


def _too_few_prompts(session: Session, step: int) -> str:
    """Why the run ends before this step, or ""."""
    history, config = session.history, session.plan.config
    per_step = config.rollout.prompts_per_step
    if history is None or (active := history.num_active(step)) >= per_step:
        return ""
    return (
        f"after step {step - 1} the run is done: {active} of {len(history.prompts)} prompts are not retired "
        f"(data.retire_after={config.data.retire_after}), fewer than the {per_step} of a step"
    )


async def record_steps(session: Session, queues: StepQueues) -> int:
    """Load and verify every adapter that the trainer publishes, and record its step. Returns the last one."""
    plan, progress, recorded = session.plan, session.progress, time.monotonic()
    trained: dict[int, Interval] = {}
    judge = rollout_judge(plan)
    equal = EqualRewards()
    train_s: float | None = None
    for step in range(plan.first_step, plan.last_step + 1):
        progress.begin_step(step)
        progress.phase("sampling", f"step {step} of {plan.config.num_steps}")
        sampled = await queues.samples.get()
        if sampled is None:
            progress.step = step - 1
            return step - 1
        progress.phase("training", f"step {step} of {plan.config.num_steps}")
        with long_work(f"training step {step}", expected_s=train_s):
            trainer_step = await wait_for_trainer_step(plan, step)
        train_s = trainer_step.trained[1] - trainer_step.trained[0]
        progress.event("trainer_step_seen", step=step)
        _log_what_it_says(plan.run, trainer_step, step)
        progress.phase("syncing", adapter_name(step))
        turns = await take_memory_back(session, queues, step)
        adapter, load_s = await load_adapter(session, step)
        # A trainer may score held-out rows, or write a checkpoint, before the parent sees the step.
        other_s = sum(trainer_step.metrics.get(f"time/{work}_s", 0.0) for work in ("eval", "checkpoint"))
        sync_s = time.monotonic() - trainer_step.trained[1] - other_s
        report = await verify_adapter(session, adapter, load_s)
        is_evaluated = is_evaluated_after(plan.config, step)
        if not is_evaluated:
            queues.versions.put_nowait(adapter)
        trained[step], now = trainer_step.trained, time.monotonic()
        times = step_timings((recorded, now), queues, trained, step, sync_s)
        recorded = now
        metrics = step_metrics(step, sampled, trainer_step.metrics, report, times) | turns
        if not plan.config.algorithm.compares_groups:  # equal rewards say nothing of a signal
            metrics.pop("groups/zero_std_sampled_frac", None)
        metrics["restarts"] = sum(progress.restarts.values())
        bins = trainer_step.rollout_gaps.get("bins", ())
        if bins and not sampled.stored:
            metrics["mismatch/judged_gap"], metrics["mismatch/judged_tokens"] = mean_gap(bins)
        append_metrics(plan.run.metrics_path, metrics)
        for text in filter(None, (equal.after(metrics), _tag_warning(plan.config, step, sampled))):
            logger.warning(f"step {step}: {text}")
        progress.warning = equal.text(metrics) if equal.steps >= EQUAL_STEPS else None
        progress.recorded = step
        progress.screen.step(metrics, completion_view(sampled.groups))
        judge_rollouts(judge, step, sampled, trainer_step.rollout_gaps, report.canary)
        if is_evaluated:  # before sampling uses the engines; not counted in any step's time
            await evaluate_held_out(session, "step", version=step)
            queues.versions.put_nowait(adapter)
            recorded = time.monotonic()
        await asyncio.to_thread(clean_up, plan.run, session.adapters, step, plan.config)
        reasons = (w.step_ended(plan, metrics) for w in session.watches if step < plan.config.num_steps)
        if reason := next(filter(None, reasons), ""):
            logger.info(reason)
            await asyncio.Event().wait()  # run_until_stopped sees the request and cancels this task
    return plan.last_step


def _tag_warning(config: TrainConfig, step: int, sampled: SampledStep) -> str:
    """A program of an episode reads thoughts apart, so their tags do not count there."""
    if step > 1 or config.source.name != "single-turn":
        return ""
    return unopened_tag(sampled.groups, config.reward.prefill)


def _log_what_it_says(run: RunDir, trainer_step: TrainerStep, step: int) -> None:
    for note in trainer_step.notes:
        logger.info(note)
    for warning in trainer_step.warnings:
        logger.warning(warning)
    if "anomaly/reason" in trainer_step.metrics:
        reason = trainer_step.metrics["anomaly/reason"]
        logger.warning(
            f"step {step} is skipped, {adapter_name(step)} equals the adapter before it: {reason} "
            f"(its inputs are in {run.rejected_steps})"
        )


def rollout_judge(plan: RunPlan) -> RolloutJudge:
    """Judges the rollouts of this run. After a resume it knows the first step's gap from the metrics."""
    first = (number(m, "mismatch/judged_gap") for m in read_metrics(plan.run.metrics_path))
    return RolloutJudge(
        plan.resolved.placement.dtype,
        plan.config.rollout.temperature,
        plan.config.sync.rollout_mismatch,
        reference=next(filter(math.isfinite, first), math.nan),
    )


def judge_rollouts(
    judge: RolloutJudge, step: int, sampled: SampledStep, gaps: Mapping[str, Any], canary: CanaryReading
) -> None:
    """Warn of a mismatch, or raise SyncFailed. Says once why the rollouts cannot be judged."""
    why_not = gaps.get("not_judged", "")
    if sampled.stored:
        why_not = f"those of step {step} were stored: an engine of an earlier process sampled them"
    if why_not:
        judge.say_once(f"the rollouts are not compared with the trainer's logprobs: {why_not}")
    elif warning := _judged(judge, step, gaps, canary):
        logger.warning(warning)


def _judged(judge: RolloutJudge, step: int, gaps: Mapping[str, Any], canary: CanaryReading) -> str:
    return judge.judge(step, gaps["bins"], canary.rounding, canary.base_distance) if "bins" in gaps else ""


def step_timings(
    window: Interval, queues: StepQueues, trained: dict[int, Interval], step: int, sync_s: float
) -> StepTimings:
    """Timings of a step. `window`: from the record of the step before to the record of this one."""
    sampling = queues.sampling
    busy = [i for times in (queues.requests, trained) for i in times.values() if i[1] >= window[0]]
    return StepTimings(
        rollout_s=sampling[step][1] - sampling[step][0],
        step_s=window[1] - window[0],
        sync_s=sync_s,
        overlap_s=busy_s(sampling[step], trained.values()),
        overhead_s=window[1] - window[0] - busy_s(window, busy),
    )


def initial_versions(session: Session) -> list[int]:
    """Versions to load before the first step, oldest first: the one it is sampled from, and the newest.

    They differ after a resume with rollout.max_staleness = 1. If the older one is gone (lora_sync_path
    in memory, after a reboot), the first step is sampled from the newest; its rollouts record that.
    """
    newest = session.plan.first_step - 1
    if session.plan.config.rollout.max_staleness > 1:  # batches start from the newest
        return [newest]
    source = sampling_version(session.plan.first_step, session.plan.config.rollout.max_staleness)
    if not session.adapter(source).path.exists():
        logger.warning(
            f"{adapter_name(source)} is missing in {session.adapters}: step {newest + 1} is sampled from "
            f"{adapter_name(newest)} instead, unlike in an uninterrupted run"
        )
        source = newest
    return sorted({source, newest})


async def wait_for_trainer_step(plan: RunPlan, step: int) -> TrainerStep:
    """Wait until the trainer has finished `step` and published its adapter.

    Raises TrainerLost after trainer.step_timeout_s. If the trainer dies instead, the supervisor raises.
    """
    run, timeout_s = plan.run, plan.config.trainer.step_timeout_s
    deadline = time.monotonic() + timeout_s
    while not run.trainer_step_path(step).exists():
        if time.monotonic() > deadline:
            what = f"finish step {step}" if step >= plan.first_step else "start"
            raise TrainerLost(
                f"The trainer did not {what} within {timeout_s:g} s (trainer.step_timeout_s): it hangs.",
                f"Read {run.log_path('trainer')}, or raise trainer.step_timeout_s.",
            )
        await asyncio.sleep(POLL_S)
    body = run.read_json(run.trainer_step_path(step))
    started, ended = body["trained"]
    choices, warnings = body.get("choices", []), body.get("warnings", [])
    gaps, notes = body.get("rollout_gaps", {}), body.get("notes", [])
    return TrainerStep(trainer_metrics(body), (started, ended), choices, warnings, notes, gaps)


async def load_adapter(session: Session, version: int) -> tuple[AdapterVersion, float]:
    """Load a published version on every engine. Returns it, and the seconds."""
    adapter = session.adapter(version)
    load_s = await session.engines.load(adapter)
    session.progress.event("adapter_loaded", version=version)
    session.progress.adapter_version, session.progress.adapter_verified = version, None
    return adapter, load_s


async def verify_adapter(session: Session, adapter: AdapterVersion, load_s: float) -> SyncReport:
    """Verify hash and canary. Raises SyncFailed or ModelError."""
    started = time.monotonic()
    canary = await session.engines.verify(adapter)
    session.progress.event("adapter_verified", version=adapter.version)
    session.progress.adapter_verified = None if math.isnan(canary.gap_max) else canary.is_verified
    return SyncReport(load_s=load_s, canary_s=time.monotonic() - started, canary=canary)


async def unload_before(session: Session, before: int) -> None:
    """Unload versions older than `before`, which no request uses any more."""
    for adapter in await session.engines.unload_before(before):
        session.progress.event("adapter_unloaded", version=adapter.version)
