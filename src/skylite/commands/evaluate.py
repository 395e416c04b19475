"""`skylite eval`: pass@1 of an adapter or of the base model, sampled with vLLM.

The first of reward.functions alone scores, unweighted, or the data's own reward: it measures accuracy.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.adapters.folder import ServedAdapter, find_adapter
from skylite.config.loading import load_config
from skylite.config.rollout import RewardParameters
from skylite.config.train import TrainConfig
from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.data.tokenizer import encode_in_thread, load_tokenizer
from skylite.engine.client import VllmClient
from skylite.engine.connections import open_files
from skylite.engine.server_command import BASE_NAME, EngineSpec
from skylite.engine.single_engine import single_engine_spec
from skylite.engine.startup import serving_engines
from skylite.engine.watchdog import RestartPolicy
from skylite.errors import ConfigError
from skylite.evaluation.evaluate import EvalResult, write_results
from skylite.evaluation.evaluate import evaluate as score_problems
from skylite.hub.resolve import resolve_model
from skylite.orchestrator.allowed_programs import allow_rewards
from skylite.orchestrator.reward_settings import apply_reward_settings
from skylite.plugin_file import REWARD
from skylite.processes.file_descriptors import raise_file_limit
from skylite.processes.supervisor import Supervisor
from skylite.rewards.worker_pool import RewardPool
from skylite.run.files import write_json
from skylite.run.programs_named_by_user import is_set
from skylite.run.run_dir import AdapterVersion
from skylite.types import Prompt
from skylite.ui.logs import show

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalFlags:
    """The flags of `skylite eval`."""

    target: Path | None
    base: bool
    model: str | None
    data: Path | None
    split: str
    limit: int | None
    n: int
    step: int | None
    seed: int
    settings: tuple[str, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """A checked evaluation."""

    adapter: ServedAdapter | None
    model_name: str
    config: TrainConfig
    prompts: list[Prompt]
    reward: str
    """Spec of the first reward function, the one that measures accuracy."""
    programs: dict[str, str]
    """FILE.py:function -> sha256 of the file that the user allowed."""
    out: Path
    """Folder of the results."""
    label: str
    """Adapter name, or base."""
    has_answers: bool = True
    """Whether the data has reference answers."""


def evaluate(flags: EvalFlags) -> None:
    """Evaluate with the first reward function and print the accuracy.

    Writes results to RUN/evals, or to ./evals without a run.
    """
    plan = plan_eval(flags)
    result = asyncio.run(run_eval(plan, flags))
    stem = f"{plan.label}-{flags.split}-{'greedy' if flags.n == 1 else f'mean{flags.n}'}"
    write_results(plan.out / f"{stem}.parquet", result)
    write_json(plan.out / f"{stem}.json", summary(plan, flags, result))
    names = ("pass@1", "accuracy") if plan.has_answers else ("mean reward", "mean reward")
    kind = f"greedy {names[0]}" if flags.n == 1 else f"sampled {names[1]} (T 1, mean of {flags.n})"
    show(f"{plan.label} on {flags.split}: {kind} {result.accuracy}, "
          f"{result.completion_tokens_mean:.1f} tokens per completion, "
          f"{100 * result.truncated_frac:.1f} % truncated")  # fmt: skip
    show(f"per-problem results: {plan.out / stem}.parquet")


def plan_eval(flags: EvalFlags) -> EvalPlan:
    """Check the flags, the adapter and the data. Raises SkyliteError subclasses."""
    if flags.base and flags.target is not None:
        raise ConfigError(
            f"--base evaluates the model without an adapter, but {flags.target} was given too.",
            "Remove one of them; choose the base model with --model.",
        )
    if not flags.base and flags.target is None:
        raise ConfigError(
            "Nothing to evaluate: no run, no adapter folder, no --base.", "E.g. `skylite eval runs/my-run`."
        )
    adapter = None if flags.base else find_adapter(_required(flags.target), flags.step)
    recorded = adapter.run_config.config if adapter is not None and adapter.run_config is not None else None
    config = load_config(None, {}, flags.settings) if recorded is None else merged(recorded, flags.settings)
    data = flags.data or Path(config.data.path)
    prompts, info = _problems(data, flags, config)
    if recorded is None or flags.data is not None:
        given = {name for name in RewardParameters.model_fields if is_set(flags.settings, f"reward.{name}")}
        config, note = apply_reward_settings(config, info, keep=given)
        if note:
            logger.info(note)
    named_by = None if is_set(flags.settings, REWARD.setting) else flags.target
    (reward,), programs = allow_rewards(config.reward.functions[:1], info, data, named_by=named_by)
    model_name = flags.model or (adapter.base_model if adapter is not None else config.model.name)
    run = adapter.run if adapter is not None else None
    label = "base" if adapter is None else adapter.adapter.name
    return EvalPlan(
        adapter=adapter,
        model_name=model_name,
        config=config,
        prompts=prompts,
        reward=reward,
        programs=programs,
        out=run.evals if run is not None else Path("evals"),
        label=label,
        has_answers=info.has_answers,
    )


def merged(recorded: TrainConfig, settings: tuple[str, ...]) -> TrainConfig:
    """The recorded settings of a run, overridden by --set."""
    flat: dict[str, Any] = {}
    for section, value in recorded.model_dump(mode="json").items():
        flat |= (
            {f"{section}.{k}": v for k, v in value.items()} if isinstance(value, dict) else {section: value}
        )
    return load_config(None, flat, settings)


async def run_eval(plan: EvalPlan, flags: EvalFlags) -> EvalResult:
    """Start one engine, sample, score, and end the engine."""
    logger.info(
        f"evaluating {plan.label} of {plan.model_name} on {len(plan.prompts)} problems; starting vLLM"
    )
    raise_file_limit(open_files(plan.config))
    model = resolve_model(plan.model_name)
    token_ids, stop_token_ids = await _encode(model.path, plan)
    pool = RewardPool(
        [plan.reward],
        num_workers=plan.config.reward.num_workers,
        timeout_s=plan.config.reward.timeout_s,
        programs=plan.programs,
        log_path=plan.out / "rewards.log",
        parameters=plan.config.reward,
    )
    try:
        async with Supervisor() as supervisor:
            with tempfile.TemporaryDirectory(prefix="skylite-") as folder:
                spec = single_engine_spec(plan.config, plan.adapter, model.path, Path(folder) / "vllm.sock")
                work = asyncio.ensure_future(
                    _score(plan, flags, spec, supervisor, pool, token_ids, stop_token_ids)
                )
                watching = asyncio.ensure_future(supervisor.watch())
                await asyncio.wait({work, watching}, return_when=asyncio.FIRST_COMPLETED)
                if not work.done():
                    work.cancel()
                    watching.result()
                watching.cancel()
                return work.result()
    finally:
        pool.close()


async def _encode(model_path: Path, plan: EvalPlan) -> tuple[dict[str, list[int]], tuple[int, ...]]:
    """Token ids of the prompts, and the tokens that end a turn. In threads, so that Ctrl-C is heard."""
    tokenizer = await asyncio.to_thread(load_tokenizer, model_path)
    with contextlib.closing(tokenizer):
        longest = plan.config.rollout.max_prompt_tokens
        return await encode_in_thread(tokenizer, plan.prompts, longest), tokenizer.stop_token_ids


async def _score(
    plan: EvalPlan,
    flags: EvalFlags,
    spec: EngineSpec,
    supervisor: Supervisor,
    pool: RewardPool,
    token_ids: dict[str, list[int]],
    stop_token_ids: tuple[int, ...],
) -> EvalResult:
    logs = Path(spec.uds).parent
    restarts = RestartPolicy(config=plan.config.engine, verify=_skip_verification, counts={})
    async with serving_engines([spec], logs, supervisor, restarts) as engines:
        name, version = BASE_NAME, 0
        if plan.adapter is not None:
            await engines[0].load_adapter(plan.adapter.adapter)
            name, version = plan.adapter.adapter.name, plan.adapter.adapter.version
        return await score_problems(
            engines,
            name,
            version,
            plan.prompts,
            token_ids,
            pool,
            n=flags.n,
            temperature=0.0 if flags.n == 1 else 1.0,
            max_tokens=plan.config.rollout.max_completion_tokens,
            stop_token_ids=stop_token_ids,
            seed=flags.seed,
        )


async def _skip_verification(client: VllmClient, adapter: AdapterVersion) -> None:
    """An adapter from elsewhere has no canary to verify against."""


def _problems(data: Path, flags: EvalFlags, config: TrainConfig) -> tuple[list[Prompt], PromptFileInfo]:
    prompts, info = read_prompts(data / f"{flags.split}.parquet", difficulty=tuple(config.data.difficulty))
    return prompts[: flags.limit], info


def _required(target: Path | None) -> Path:
    assert target is not None, "checked by the caller"
    return target


def summary(plan: EvalPlan, flags: EvalFlags, result: EvalResult) -> dict[str, Any]:
    """Inputs, settings and results of the evaluation, as JSON."""
    accuracy = result.accuracy
    return {
        "adapter": plan.label,
        "model": plan.model_name,
        "data": str(flags.data or plan.config.data.path),
        "split": flags.split,
        "difficulty": plan.config.data.difficulty,
        "problems": accuracy.num_problems,
        "n": flags.n,
        "temperature": result.temperature,
        "accuracy": accuracy.mean,
        "low": accuracy.low,
        "high": accuracy.high,
        "standard_error": accuracy.standard_error,
        "completion_tokens_mean": result.completion_tokens_mean,
        "truncated_frac": result.truncated_frac,
        "seed": flags.seed,
    }
