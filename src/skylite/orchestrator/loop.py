"""The steps of a run as the parent sees them: sample, hand over, take the new version, verify it, record; sampling one step ahead if asked.

Two tasks. `sample_steps` samples step after step, each as soon as the version it is sampled from is loaded, and hands the rollout file
to the trainer. `follow_training` takes each new version, shows it and records the step. On-policy they wait for each other in turn;
with rollout.max_staleness = 1 the version for step k + 1 is there before step k is trained, and they overlap.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skylite.adapters.retention import Label, clean_up, held_out_scores, write_score
from skylite.config.train import TrainConfig
from skylite.data.tokenizer import encode_prompts
from skylite.engine.collect import gather_or_cancel
from skylite.engine.pool import SyncReport
from skylite.errors import TrainerLost
from skylite.evaluation.evaluate import EvalResult, evaluate, write_results
from skylite.orchestrator.metrics import (
    Span,
    StepTimes,
    completion_view,
    covered_s,
    step_metrics,
    trainer_metrics,
)
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.sampling import SampledStep, sample_step
from skylite.orchestrator.session import Session
from skylite.run.metrics import append_metrics
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import AdapterVersion, adapter_name, sampling_version

logger = logging.getLogger(__name__)
POLL_S = 0.02


@dataclass(frozen=True, slots=True)
class Update:
    """What the trainer says of a version that it has published."""

    metrics: dict[str, Any]
    trained: Span
    """When it computed."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """A version that every engine has loaded, and its verification, which may still be under way."""

    adapter: AdapterVersion
    verification: asyncio.Task[SyncReport]


@dataclass(slots=True)
class Exchange:
    """What the two tasks of a run pass each other."""

    versions: asyncio.Queue[Loaded] = field(default_factory=asyncio.Queue)
    """In order, for `sample_steps`."""
    samples: asyncio.Queue[SampledStep] = field(default_factory=asyncio.Queue)
    """Steps whose rollout file is written, in order, for `follow_training`."""
    sampling: dict[int, Span] = field(default_factory=dict)
    """Step -> when it was sampled; without an end while it is."""
    newest: Loaded | None = None


async def run_steps(session: Session) -> None:
    """Every remaining step, with the evaluations before, between and after."""
    exchange = Exchange()
    try:
        await _run_steps(session, exchange)
    finally:
        # A verification that nobody waits for any more would report its end, and its engine's, on its own.
        if exchange.newest is not None:
            exchange.newest.verification.cancel()
            await asyncio.gather(exchange.newest.verification, return_exceptions=True)


async def _run_steps(session: Session, exchange: Exchange) -> None:
    plan = session.plan
    await wait_for_update(plan, plan.first_step - 1)
    versions = versions_at_start(session)
    for version in versions:
        loaded = await take_version(session, exchange, version)
        # A new run samples beside the verification, as every step does; what a resume goes on from is verified first.
        if plan.resumed or plan.held_out:
            await loaded.verification
        exchange.versions.put_nowait(loaded)
    await held_out_at_start(session, versions)
    if (
        plan.first_step <= plan.config.num_steps
    ):  # else the run died after its last step, and only what comes after it is left
        tasks = (sample_steps(session, exchange), follow_training(session, exchange))
        await gather_or_cancel([asyncio.create_task(task) for task in tasks])
    await retire_versions(session, before=plan.config.num_steps)
    await held_out_accuracy(session, "after", version=plan.config.num_steps)


async def sample_steps(session: Session, exchange: Exchange) -> None:
    """Sample every step in order and write its rollout file. No completion of a version that is not verified reaches the trainer."""
    plan, progress = session.plan, session.progress
    source = await exchange.versions.get()
    for step in range(plan.first_step, plan.config.num_steps + 1):
        while source.adapter.version < sampling_version(step, plan.config.rollout.max_staleness):
            source = await exchange.versions.get()
        version, started = source.adapter.version, time.monotonic()
        exchange.sampling[step] = (started, math.inf)
        progress.event("sampling_started", step=step, version=version)
        # Older versions have no request left, because all of those were of steps before.
        sampled, _ = await asyncio.gather(
            sample_step(session, step, source.adapter), retire_versions(session, before=version)
        )
        exchange.sampling[step] = (started, time.monotonic())
        progress.event("sampling_ended", step=step, version=version)
        await source.verification
        if not sampled.stored:
            write_rollouts(plan.run.rollout_path(step), sampled.groups)
        progress.event("rollouts_written", step=step, version=version)
        exchange.samples.put_nowait(sampled)
    await retire_versions(session, before=source.adapter.version + 1)


async def follow_training(session: Session, exchange: Exchange) -> None:
    """Take every new version as it comes, and record its step."""
    plan, progress, recorded = session.plan, session.progress, time.monotonic()
    trained: dict[int, Span] = {}
    for step in range(plan.first_step, plan.config.num_steps + 1):
        progress.step = step
        progress.phase("sampling", f"step {step} of {plan.config.num_steps}")
        sampled = await exchange.samples.get()
        progress.phase("training", f"step {step} of {plan.config.num_steps}")
        update = await wait_for_update(plan, step)
        progress.event("trainer_step_seen", step=step)
        if "anomaly/reason" in update.metrics:
            reason = update.metrics["anomaly/reason"]
            logger.warning(
                f"step {step} is skipped, {adapter_name(step)} is the adapter before it: {reason} (kept in {plan.run.rejected_steps})"
            )
        progress.phase("syncing", adapter_name(step))
        loaded = await take_version(session, exchange, step)
        is_evaluated = is_evaluated_after(plan.config, step)
        if not is_evaluated:
            exchange.versions.put_nowait(loaded)
        sync_s = time.monotonic() - update.trained[1]
        report = await loaded.verification
        trained[step], now = update.trained, time.monotonic()
        times = step_times((recorded, now), exchange.sampling, trained, step, sync_s)
        recorded = now
        metrics = step_metrics(step, sampled, update.metrics, report, times)
        metrics["restarts"] = sum(progress.restarts.values())
        append_metrics(plan.run.metrics_path, metrics)
        progress.recorded = step
        progress.screen.step(metrics, completion_view(sampled.groups))
        if is_evaluated:  # before anything is sampled from it; no part of a step's time
            await held_out_accuracy(session, "step", version=step)
            exchange.versions.put_nowait(loaded)
            recorded = time.monotonic()
        await asyncio.to_thread(clean_up, plan.run, session.adapters, step, plan.config)
        if (
            session.limit is not None
            and step < plan.config.num_steps
            and session.limit.step_ended(times.step_s)
        ):
            logger.info(str(session.limit))
            await asyncio.Event().wait()  # nothing more is begun: whoever waits for the limit ends this task


def step_times(
    window: Span, sampling: dict[int, Span], trained: dict[int, Span], step: int, sync_s: float
) -> StepTimes:
    """Seconds of a step that was recorded at the end of `window` and the step before at its start."""
    spans = [span for of_step in (sampling, trained) for k, span in of_step.items() if k >= step - 1]
    return StepTimes(
        rollout_s=sampling[step][1] - sampling[step][0],
        step_s=window[1] - window[0],
        sync_s=sync_s,
        overlap_s=covered_s(sampling[step], trained.values()),
        overhead_s=window[1] - window[0] - covered_s(window, spans),
    )


def versions_at_start(session: Session) -> list[int]:
    """What is loaded before the first step, oldest first: the version that step is sampled from, and the newest.

    After a resume the former is older when sampling ahead. Where it is gone (a lora_sync_path in memory, after a reboot), the first
    step is sampled from the newest; its completions say so.
    """
    newest = session.plan.first_step - 1
    source = sampling_version(session.plan.first_step, session.plan.config.rollout.max_staleness)
    if not session.adapter(source).path.exists():
        logger.warning(
            f"{adapter_name(source)} is not in {session.adapters} any more: step {newest + 1} is sampled from {adapter_name(newest)}, "
            "other than in a run that was not interrupted"
        )
        source = newest
    return sorted({source, newest})


async def wait_for_update(plan: RunPlan, step: int) -> Update:
    """The trainer's word on `step`; its adapter is complete by then. The supervisor raises if the trainer ends instead.

    Raises TrainerLost when it does not come in trainer.step_timeout_s.
    """
    run, timeout_s = plan.run, plan.config.trainer.step_timeout_s
    deadline = time.monotonic() + timeout_s
    while not run.trainer_step_path(step).exists():
        if time.monotonic() > deadline:
            raise TrainerLost(
                f"The trainer has not come to the end of step {step} in {timeout_s:g} s (trainer.step_timeout_s): it hangs.",
                f"Read {run.log_path('trainer')}, or raise trainer.step_timeout_s.",
            )
        await asyncio.sleep(POLL_S)
    body = run.read_json(run.trainer_step_path(step))
    started, ended = body["trained"]
    return Update(trainer_metrics(body), (started, ended))


async def take_version(session: Session, exchange: Exchange, version: int) -> Loaded:
    """Load a published version on every engine; its verification goes on beside what comes next."""
    adapter = session.adapter(version)
    load_s = await session.engines.load(adapter)
    session.progress.event("adapter_loaded", version=version)
    session.progress.adapter_version = version
    exchange.newest = Loaded(adapter, asyncio.create_task(verify_version(session, adapter, load_s)))
    return exchange.newest


async def verify_version(session: Session, adapter: AdapterVersion, load_s: float) -> SyncReport:
    """Hash and canary. Raises SyncFailed or ModelError."""
    started = time.monotonic()
    canary = await session.engines.verify(adapter)
    session.progress.event("adapter_verified", version=adapter.version)
    return SyncReport(load_s=load_s, canary_s=time.monotonic() - started, canary=canary)


async def retire_versions(session: Session, before: int) -> None:
    """Unload versions that no request names any more."""
    for adapter in await session.engines.unload_before(before):
        session.progress.event("adapter_unloaded", version=adapter.version)


def is_evaluated_after(config: TrainConfig, step: int) -> bool:
    """Whether the held-out problems are due between this step and the next."""
    return config.eval.every > 0 and step % config.eval.every == 0 and 0 < step < config.num_steps


async def held_out_at_start(session: Session, versions: Sequence[int]) -> None:
    """What comes before the first step: the first evaluation or, of a run that died in a later one, that one, if its version is loaded."""
    plan = session.plan
    if plan.first_step == 1:
        await held_out_accuracy(session, "before", version=0)
        return
    scores = held_out_scores(plan.run, plan.config.eval)
    for version in (v for v in versions if is_evaluated_after(plan.config, v) and v not in scores):
        await held_out_accuracy(session, "step", version=version)


async def held_out_accuracy(session: Session, label: Label, version: int) -> EvalResult | None:
    """Greedy pass@1 on the held-out problems, shown and kept in evals/; None when the run has none."""
    plan = session.plan
    if not plan.held_out:
        return None
    session.progress.phase("evaluating", f"{label}: {len(plan.held_out)} held-out problems")
    result = await evaluate(
        session.engines.engines,
        adapter_name(version),
        version,
        plan.held_out,
        encode_prompts(session.tokenizer, plan.held_out, plan.config.rollout.max_prompt_tokens),
        session.scorer,
        n=1,
        temperature=0.0,
        max_tokens=plan.config.rollout.max_completion_tokens,
        stop_token_ids=session.tokenizer.stop_token_ids,
        seed=plan.config.seed,
    )
    write_results(plan.run.evals / f"{label}-v{version:06d}.parquet", result)
    write_score(plan.run, label, version, result.accuracy.mean, plan.config.eval)
    when = f"step {version}: " if label == "step" else ""
    session.progress.screen.evaluation(label, f"{when}greedy pass@1 {result.accuracy}")
    return result
