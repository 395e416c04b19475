"""Train a LoRA adapter. Each step samples, scores, updates, then reloads and verifies the adapter."""

from __future__ import annotations

import contextlib
import json
import logging
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from skylite.cli.options import RUNS
from skylite.cli.setting_flags import Flags, takes_settings
from skylite.config.base_section import LENGTH, RUN, SAFETY, WHAT, Flag
from skylite.config.loading import load_config, read_run_config
from skylite.config.provenance import Provenance
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.notes import Note, log_notes
from skylite.run.run_dir import RunDir
from skylite.ui.logs import run_log, show, show_printed

if TYPE_CHECKING:
    from skylite.rollout.plan import RunPlan
    from skylite.rollout.session import TimeLimit

logger = logging.getLogger(__name__)


class TrainFlags(Flags):
    """The flags of `skylite train` that are not settings."""

    provenance: Provenance
    recipe: Annotated[str | None, Flag("--recipe", WHAT, default="the bundled one for this machine")] = None
    """TOML or YAML file, or the name of a bundled recipe."""
    max_hours: Annotated[float | None, Flag("--max-hours", LENGTH, default="no limit")] = Field(None, ge=0)
    """Stop before the step that would exceed these hours."""
    run: Annotated[
        Path | None,
        Flag("--run", RUN, default="runs/RECIPE-DATE; runs/DATA-DATE with --data and no recipe"),
    ] = None
    """Folder of the new run."""
    resume: Annotated[Path | None, Flag("--resume", RUN, default="start a new run")] = None
    """Resume this run from its newest valid checkpoint."""
    at: Annotated[int | None, Flag("--at", RUN, default="the newest")] = Field(None, ge=0)
    """With --resume: use the checkpoint of this step; 0 starts the run again."""
    dry_run: Annotated[bool, Flag("--dry-run", SAFETY)] = False
    """Check everything, print the resolved settings, start nothing."""


@takes_settings("all", of="recipe")
def train(flags: TrainFlags) -> None:
    """Train, or resume a run. Raises SkyliteError subclasses.

    Exits 130 after a clean stop by Ctrl-C, and 0 after a stop by --max-hours.
    """
    from skylite.rollout.session import TimeLimit

    if flags.resume is not None:
        _refuse_flags_on_resume(flags)
    elif flags.at is not None:
        raise ConfigError(
            f"--at {flags.at} chooses a checkpoint of the run to resume, but --resume is missing.",
            "Add --resume RUN, or remove --at.",
        )
    limit = TimeLimit(flags.max_hours) if flags.max_hours is not None else None
    if flags.dry_run:
        show_printed()
    if flags.resume is not None:
        finished = _resume(flags, RunDir(flags.resume.resolve()), limit)
    else:
        finished = _start(flags, limit)
    if not finished and not (limit is not None and limit.reached):
        sys.exit(130)


def _start(flags: TrainFlags, limit: TimeLimit | None) -> bool:
    """Start a new run. Returns whether it finished."""
    from skylite.rollout.plan import write_run
    from skylite.run.own_folders import lock_run

    plan, data_path = plan_new(flags.provenance, flags.recipe, flags.run, keep=not flags.dry_run)
    if flags.dry_run:
        shown = plan.config.data.model_copy(update={"path": data_path})
        show_plan(plan, plan.config.model_copy(update={"data": shown}))
        return True
    # Lock before writing: of two processes that start at once, one must see the lock of the other.
    with lock_run(plan.run.root, plan.resolved.identity.lora_sync_path, plan.config.lora):
        write_run(plan)
        return _train(plan, limit)


def plan_new(
    provenance: Provenance, chosen: str | None, run: Path | None, *, keep: bool
) -> tuple[RunPlan, str]:
    """The checked plan of a new run, and data.path as set. Raises SkyliteError subclasses.

    `chosen`: --recipe. `run`: its folder. `keep`: prepare the default's data where it is missing.
    """
    from skylite.cli.train_defaults import (
        default_data,
        default_recipe,
        find_recipe,
        is_own_data_recipe,
        size_by_data,
    )
    from skylite.data.prompt_order import steps_per_epoch
    from skylite.rollout.disk_check import check_disk_space
    from skylite.rollout.plan import plan_run

    data = provenance.typed.get("data.path")
    recipe = find_recipe(chosen) if chosen else default_recipe(None if data is None else Path(data.value))
    provenance = replace(provenance, file=recipe)
    config = load_config(recipe, provenance)
    follows_data = is_own_data_recipe(recipe)
    name = Path(config.data.path).resolve().name if follows_data else recipe.stem
    run_dir = RunDir((run or _new_run(name)).resolve())
    is_default = chosen is None and data is None
    with default_data(config, keep=keep) if is_default else contextlib.nullcontext(config) as readable:
        sizes: list[Note] = []
        if follows_data:
            from skylite.processes.hardware import choose_device

            readable, sizes = size_by_data(readable, gpu=choose_device() == "cuda")
        plan = plan_run(readable, run_dir, provenance, notes=sizes)
    steps_per_epoch(len(plan.train), plan.config.rollout.prompts_per_step)  # refuses too few prompts
    check_disk_space(plan.run, plan.config, plan.resolved)
    return plan, config.data.path


def _resume(flags: TrainFlags, run: RunDir, limit: TimeLimit | None) -> bool:
    """Resume an existing run. Returns whether it finished."""
    from skylite.rollout.disk_check import check_disk_space
    from skylite.rollout.engine_check import check_engines
    from skylite.rollout.resume import plan_resume
    from skylite.run.own_folders import lock_run, require_own_folders

    recorded = read_run_config(run.config_path)
    require_own_folders(run, recorded)
    with contextlib.ExitStack() as locks:
        if not flags.dry_run:  # before reading the run: a live one may write a newer checkpoint at any moment
            locks.enter_context(lock_run(run.root, run.adapters(recorded), recorded.config.lora))
        plan = plan_resume(run, flags.provenance, at=flags.at)
        log_notes(check_engines(plan.run_config))
        if flags.dry_run:
            show_plan(plan, plan.config)
            return True
        check_disk_space(plan.run, plan.config, plan.resolved)
        return _train(plan, limit)


def _train(plan: RunPlan, limit: TimeLimit | None) -> bool:
    """Run all steps, in locked folders. Returns whether the run finished."""
    import asyncio  # here, so that --help stays fast

    from skylite.rollout.failures import failures_recorded
    from skylite.rollout.run_session import run_session

    with failures_recorded(plan), run_log(plan.run.log_path("skylite")):
        return asyncio.run(run_session(plan, resume=plan.resumed, limit=limit))


def print_settings(config: TrainConfig) -> None:
    """Print the resolved settings as JSON on stdout."""
    # json.dumps escapes control characters, which `show` would replace by spaces.
    show(json.dumps(config.model_dump(mode="json"), indent=1))


def show_plan(plan: RunPlan, config: TrainConfig) -> None:
    """What --dry-run prints: settings, memory of each GPU, and a verdict."""
    from skylite.cli.plan import memory_of_run

    print_settings(config)
    if memory := memory_of_run(plan):
        logger.info("predicted memory:\n%s", memory)
    logger.info(ready_text(plan))


def ready_text(plan: RunPlan) -> str:
    """The verdict of --dry-run: what the same command without it would do."""
    source, last = plan.config.source, plan.config.num_steps
    steps = f"steps {plan.first_step} to {last}" if plan.resumed else f"{last} steps"
    epochs = last * plan.config.rollout.prompts_per_step / len(plan.train)
    warnings = sum(note.is_warning for note in plan.resolved.notes)
    verdict = f"ready, with {warnings} warning(s)" if warnings and not plan.resumed else "ready"
    return (
        f"{verdict}: {steps}, {len(plan.train)} {source.rows} ({source.step} a step, {epochs:.2g} epochs), "
        f"{len(plan.held_out)} held out; "
        "without --dry-run this command trains"
    )


def _new_run(name: str) -> Path:
    return RUNS / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_flags_on_resume(flags: TrainFlags) -> None:
    """Refuse flags that start a new run. rollout/resume.py checks the settings."""
    if flags.provenance.is_typed("lora.from_adapter"):
        raise ConfigError(
            "--from-adapter starts a new run and --resume continues one; they cannot be combined.",
            "Remove one of them.",
        )
    typed = (["--recipe"] if flags.recipe else []) + (["--run"] if flags.run else [])
    if typed:
        raise ConfigError(
            f"--resume continues a run with its recipe and folder, but {', '.join(typed)} was given too.",
            "Remove it.",
        )
