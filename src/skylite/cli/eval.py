"""Evaluate adapters or the base model on held-out problems. Prints accuracies with 95 % intervals.

Writes per-problem results to RUN/evals, or to ./evals without a run.
"""

from __future__ import annotations

import asyncio
import json
import logging
from contextlib import AsyncExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated

import typer
from pydantic import Field

from skylite.adapters.folder import ServedAdapter, available_steps, find_adapter, find_versions
from skylite.cli.options import (
    WHICH,
    AsJson,
    Model,
    Step,
    newest_run,
    numbers,
)
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import Flag
from skylite.config.loading import change_config, load_config
from skylite.config.provenance import Provenance
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import ChatTemplate, read_template, run_template
from skylite.engine.connections import open_files
from skylite.engine.retrying_engine import RetryingEngine
from skylite.engine.start_engines import refuse_urls, run_on_engine, single_engine_spec
from skylite.errors import ConfigError
from skylite.evaluation.evaluate import EvalResult, write_results
from skylite.evaluation.results import Report, Scored
from skylite.evaluation.versions import ProblemSet, Subject, evaluate_subjects
from skylite.hub.resolve import resolve_model
from skylite.processes.streams import raise_file_limit
from skylite.progress_reporting import long_work
from skylite.rollout.eval_data import DataChoice, EvalData, read_data, start_problems
from skylite.rollout.trusted_programs import allowed_launcher
from skylite.run.files import write_json
from skylite.run.own_folders import require_own_place
from skylite.ui.logs import show

logger = logging.getLogger(__name__)


PROBLEMS = "Problems and samples"


class EvalFlags(Flags):
    """The flags of `skylite eval`."""

    provenance: Provenance
    target: Annotated[
        Path | None, typer.Argument(help="A run or an adapter folder. Default: the newest run.")
    ] = None
    base: Annotated[bool, Flag("--base", WHICH)] = False
    """Evaluate the base model; with a run, compare its adapters with it."""
    model: Model = None
    data: Annotated[list[Path] | None, Flag("--data", PROBLEMS)] = None
    """Folder written by `skylite prepare`. Repeatable. Default: that of the run."""
    split: Annotated[str, Flag("--split", PROBLEMS)] = "test"
    """train, validation or test."""
    limit: Annotated[int | None, Flag("--limit", PROBLEMS)] = Field(None, ge=1)
    """Evaluate the first N problems of each data set only. Default: all."""
    n: Annotated[int, Flag("--n", PROBLEMS)] = Field(1, ge=1)
    """Samples per problem. 1: greedy. More: temperature 1, with pass@k."""
    step: Step = None
    steps: Annotated[str, Flag("--steps", WHICH)] = ""
    """Several versions on one engine, e.g. 0,50,100. Compares with the first. Default: one version."""
    all_steps: Annotated[bool, Flag("--all", WHICH)] = False
    """All versions that the run keeps."""
    max_loras: Annotated[int, Flag("--max-loras", WHICH)] = Field(4, ge=1)
    """Adapters in the engine at once. More need more memory."""
    seed: Annotated[int, Flag("--seed", PROBLEMS)] = Field(0, ge=0)
    """Seed of sampling and of the bootstrap."""
    as_json: AsJson = False


@takes_settings(["env.episode", "data.chat_template", "data.template_args"], of="run")
def eval(flags: EvalFlags) -> None:
    """Evaluate with the first reward function and print the metrics.

    The first of reward.functions alone scores, unweighted, or the data's own reward. An environment's
    episodes score themselves: their first component counts.
    """
    evaluate(flags if flags.target or flags.base else flags.model_copy(update={"target": newest_run()}))


@dataclass(frozen=True, slots=True, kw_only=True)
class EvalPlan:
    """A checked evaluation."""

    adapters: list[ServedAdapter]
    subjects: list[Subject]
    """The base first, if it is evaluated, then the adapters by step."""
    model_name: str
    config: TrainConfig
    template: ChatTemplate
    data: list[EvalData]
    out: Path
    """Folder of the results."""


def evaluate(flags: EvalFlags) -> None:
    """Evaluate, write the results to RUN/evals, or to ./evals without a run, and print the metrics."""
    plan = plan_eval(flags)
    report = Report(
        model=plan.model_name,
        difficulty=plan.config.data.difficulty,
        data={d.name: str(d.path) for d in plan.data},
        rewards={d.name: d.reward for d in plan.data},
        parameters={d.name: d.scored.config.reward for d in plan.data},
        split=flags.split,
        seed=flags.seed,
    )
    asyncio.run(run_eval(plan, flags, report))
    facts = report.as_json()
    if len(plan.subjects) * len(plan.data) > 1:
        path = plan.out / f"compared-{flags.split}-{kind_of(flags.n)}.json"
        write_json(path, facts)
        logger.info(f"all results: {path}")
    show(json.dumps(facts, indent=1) if flags.as_json else report.text())


def kind_of(n: int) -> str:
    """Part of the result files' names."""
    return "greedy" if n == 1 else f"mean{n}"


def plan_eval(flags: EvalFlags) -> EvalPlan:
    """Check the flags, the adapters and the data. Raises SkyliteError subclasses."""
    adapters = find_adapters(flags)
    newest = adapters[-1] if adapters else None
    out = results_folder(newest)
    recorded = newest.run_config.config if newest is not None and newest.run_config is not None else None
    config = (
        load_config(None, flags.provenance)
        if recorded is None
        else change_config(recorded.as_sampled(), flags.provenance)
    )
    refuse_urls(config, "eval")
    subjects = [Subject(found.adapter) for found in adapters]
    if flags.base:
        subjects.insert(0, Subject(None))
    choice = DataChoice(
        paths=tuple(flags.data or [Path(config.data.path)]),
        split=flags.split,
        limit=flags.limit,
        provenance=replace(flags.provenance, file=flags.target),
        is_own=recorded is not None and not flags.data,
    )
    return EvalPlan(
        adapters=adapters,
        subjects=subjects,
        model_name=flags.model or (newest.base_model if newest is not None else config.model.name),
        config=config,
        template=chosen_template(newest, config, flags.provenance),
        data=read_data(choice, config),
        out=out,
    )


def results_folder(newest: ServedAdapter | None) -> Path:
    """RUN/evals, or ./evals without a run. Raises ConfigError if a link there leads elsewhere."""
    run = newest.run if newest is not None else None
    root, out = (Path.cwd(), Path("evals")) if run is None else (run.root, run.evals)
    require_own_place(root, out)
    return out


def find_adapters(flags: EvalFlags) -> list[ServedAdapter]:
    """The adapters that the flags choose, by step. Raises ConfigError or ModelError."""
    steps = numbers(flags.steps)
    choices = [flags.step is not None, bool(steps), flags.all_steps]
    if flags.target is None:
        if not flags.base:
            raise ConfigError(
                "Nothing to evaluate: no run, no adapter folder, no --base.",
                "E.g. `skylite eval runs/my-run`.",
            )
        if any(choices):
            raise ConfigError(
                "--step, --steps and --all choose versions of a run, but no run was given.",
                "Give the run folder, or remove the flag.",
            )
        return []
    if sum(choices) > 1:
        raise ConfigError("--step, --steps and --all exclude each other.", "Give one of them.")
    if steps or flags.all_steps:
        return find_versions(flags.target, steps or available_steps(flags.target))
    return [find_adapter(flags.target, flags.step)]


def chosen_template(
    adapter: ServedAdapter | None, config: TrainConfig, provenance: Provenance
) -> ChatTemplate:
    """The template of the run, unless the user names another file. Both write the time of the run."""
    template = run_template(adapter.run_config if adapter is not None else None)
    if adapter is None or adapter.run_config is None or provenance.is_typed("data.chat_template"):
        return replace(read_template(config.data), now=template.now)
    return replace(template, args=config.data.template_args)


async def run_eval(plan: EvalPlan, flags: EvalFlags, report: Report) -> None:
    """Start one engine, sample and score into `report`, and end the engine."""
    subjects = ", ".join(s.name for s in plan.subjects)
    problems = sum(len(d.prompts) for d in plan.data)
    logger.info(f"evaluating {subjects} of {plan.model_name} on {problems} problems; starting the engine")
    raise_file_limit(open_files(plan.config))
    launcher = allowed_launcher(plan.config, replace(flags.provenance, file=flags.target))
    model = resolve_model(plan.model_name)
    max_loras = max(1, min(flags.max_loras, len(plan.adapters)))
    newest = plan.adapters[-1] if plan.adapters else None
    max_images = max((len(prompt.images) for d in plan.data for prompt in d.prompts), default=0)
    async with AsyncExitStack() as stack:
        problem_sets = await start_problems(
            stack, plan.data, plan.template, model.path, seed=flags.seed, logs=plan.out
        )

        async def work(engine: RetryingEngine) -> None:
            with long_work("evaluating", problems * len(plan.subjects)) as line:
                await evaluate_subjects(
                    engine,
                    plan.subjects,
                    problem_sets,
                    flags.n,
                    max_loras=max_loras,
                    on_problem=line.advance,
                    on_result=lambda *found: _keep(plan, flags, report, *found),
                )

        await run_on_engine(
            launcher,
            plan.config,
            lambda address: single_engine_spec(
                launcher,
                plan.config,
                newest,
                model.path,
                address,
                max_loras=max_loras,
                max_images=max_images,
            ),
            work,
        )


def _keep(
    plan: EvalPlan,
    flags: EvalFlags,
    report: Report,
    subject: Subject,
    problems: ProblemSet,
    result: EvalResult,
) -> None:
    """Write the result of a subject on a data set at once: an interrupted evaluation keeps it."""
    scored = Scored(subject=subject, data=problems.name, result=result)
    report.add(scored)
    stem = f"{subject.name}-{problems.name}-{flags.split}-{kind_of(flags.n)}"
    write_results(plan.out / f"{stem}.parquet", result)
    write_json(plan.out / f"{stem}.json", report.facts_of(scored))
    score = f"{result.score.name} {result.score}"
    logger.info(f"{subject.name} on {problems.name}: {score}; per problem: {plan.out / stem}.parquet")
