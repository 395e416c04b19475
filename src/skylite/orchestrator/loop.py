"""The steps of a run as the parent sees them: sample with version k - 1, hand over, take version k, prove it, record it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from skylite.data.order import prompts_for_round, prompts_for_step
from skylite.evaluation.evaluate import EvalResult, evaluate, write_results
from skylite.orchestrator.plan import RunPlan
from skylite.orchestrator.progress import Progress
from skylite.orchestrator.record import completion_view, step_metrics
from skylite.orchestrator.resample import SampledStep, replace_equal_groups
from skylite.rewards.shaping import overlong_penalty
from skylite.rollout.client import Sampling
from skylite.rollout.collect import Scorer, collect_group, gather_all, request_seed
from skylite.rollout.engines import Engines, SyncReport
from skylite.rollout.tokenizer import ChatTokenizer, encode_prompts
from skylite.run.metrics import append_metrics
from skylite.run.retention import Label, clean_up, write_score
from skylite.run.rollout_file import write_rollouts
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from skylite.types import Prompt, RolloutGroup

POLL_S = 0.02


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """What a running orchestrator works with; the resources are owned by `services.run_session`."""

    plan: RunPlan
    engines: Engines
    scorer: Scorer
    tokenizer: ChatTokenizer
    progress: Progress


async def run_steps(session: Session) -> None:
    """Every remaining step, with the evaluations before and after."""
    plan = session.plan
    await use_version(session, plan.first_step - 1)
    if plan.first_step == 1:
        await held_out_accuracy(session, "before", version=0)
    for step in range(plan.first_step, plan.config.num_steps + 1):
        await run_step(session, step)
        if plan.config.eval.every and step % plan.config.eval.every == 0 and step < plan.config.num_steps:
            await held_out_accuracy(session, "step", version=step)
        clean_up(plan.run, adapters_folder(session), step, plan.config)
    await held_out_accuracy(session, "after", version=plan.config.num_steps)


async def run_step(session: Session, step: int) -> None:
    """Sample, score, hand over, wait for the update, sync, record."""
    plan, started = session.plan, time.monotonic()
    session.progress.step = step
    session.progress.phase("sampling", f"step {step} of {plan.config.num_steps}")
    sampled = await sample_step(session, step)
    rollout_s = time.monotonic() - started
    write_rollouts(plan.run.rollout_path(step), sampled.groups)
    session.progress.phase("training", f"step {step} of {plan.config.num_steps}")
    update = await wait_for_update(plan.run, step)
    session.progress.phase("syncing", adapter_name(step))
    report = await use_version(session, step)
    metrics = step_metrics(step, sampled, update, report, rollout_s=rollout_s, step_s=time.monotonic() - started)
    append_metrics(plan.run.metrics_path, metrics)
    session.progress.screen.step(metrics, completion_view(sampled.groups))


async def sample_step(session: Session, step: int) -> SampledStep:
    """The step's rollout groups, sampled from the version the engines serve."""
    config, train = session.plan.config, session.plan.train
    algorithm, per_step = config.algorithm, config.rollout.prompts_per_step
    first = await sample_groups(session, step, prompts_for_step(train, step, per_step, config.seed), first_index=0)
    if algorithm.equal_groups != "resample":
        return SampledStep(groups=first)

    async def sample_more(round_number: int, count: int) -> list[RolloutGroup]:
        prompts = prompts_for_round(train, step, round_number, per_step, config.seed)[:count]
        session.progress.phase("sampling", f"step {step} of {config.num_steps}, {count} groups with equal rewards are replaced")
        return await sample_groups(session, step, prompts, first_index=round_number * per_step)

    sampled = await replace_equal_groups(first, sample_more, algorithm.max_resample_rounds)
    if sampled.missing:
        session.progress.screen.say(
            f"step {step}: {sampled.missing} of {per_step} groups still have equal rewards after {len(sampled.left_out)} more were sampled "
            "(algorithm.max_resample_rounds); they are dropped"
        )
    return sampled


async def sample_groups(session: Session, step: int, prompts: Sequence[Prompt], first_index: int) -> list[RolloutGroup]:
    """A group of each prompt. Prompts are numbered from `first_index` within the step: their seeds depend on it."""
    plan, adapter = session.plan, session.engines.current
    assert adapter is not None, "a version is loaded before the first step"
    rollout = plan.config.rollout
    penalty = partial(
        overlong_penalty, max_completion_tokens=rollout.max_completion_tokens, buffer_frac=plan.config.algorithm.overlong_buffer_frac
    )
    token_ids = encode_prompts(session.tokenizer, prompts, rollout.max_prompt_tokens)
    tasks = []
    for index, prompt in enumerate(prompts, first_index):
        sampling = Sampling(
            temperature=rollout.temperature,
            top_p=rollout.top_p,
            top_k=rollout.top_k,
            max_tokens=rollout.max_completion_tokens,
            stop_token_ids=session.tokenizer.stop_token_ids,
            seed=request_seed(plan.config.seed, step, index),
        )
        client, ids = session.engines.client_for(index), token_ids[prompt.id]
        group = collect_group(client, adapter.name, adapter.version, prompt, ids, rollout.group_size, sampling, session.scorer, penalty)
        tasks.append(asyncio.create_task(group))
    return await gather_all(tasks)


async def wait_for_update(run: RunDir, step: int) -> dict[str, Any]:
    """The trainer's metrics of `step`; its adapter is complete by then. The supervisor raises if the trainer ends instead."""
    while not run.update_path(step).exists():
        await asyncio.sleep(POLL_S)
    metrics: dict[str, Any] = run.read_json(run.update_path(step))["metrics"]
    return metrics


async def use_version(session: Session, version: int) -> SyncReport:
    """Bring every engine to `version`, proven."""
    await wait_for_update(session.plan.run, version)
    report = await session.engines.use(AdapterVersion(version, adapters_folder(session) / adapter_name(version)))
    session.progress.adapter_version = version
    return report


def adapters_folder(session: Session) -> Path:
    """Where the trainer publishes."""
    return Path(session.plan.resolved.lora_sync_path)


async def held_out_accuracy(session: Session, label: Label, version: int) -> EvalResult | None:
    """Greedy pass@1 on the held-out problems, shown and kept in evals/; None when the run has none."""
    plan = session.plan
    if not plan.held_out:
        return None
    session.progress.phase("evaluating", f"{label}: {len(plan.held_out)} held-out problems")
    result = await evaluate(
        session.engines.clients,
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
