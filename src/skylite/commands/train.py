"""`skylite train`: flags to a checked plan to a run."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.commands.defaults import default_recipe, find_recipe, prepare_default_data
from skylite.config.loading import load_config, read_run_config
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError
from skylite.orchestrator.shutdown import TimeLimit
from skylite.run.lock import lock_folder
from skylite.run.ownership import require_own_folders
from skylite.run.run_dir import RunDir
from skylite.ui.logs import run_log


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """The named flags of `skylite train`; None where not given. Each is an alias of one setting."""

    recipe: str | None
    model: str | None
    data: Path | None
    rank: int | None
    alpha: float | None
    steps: int | None
    lr: float | None
    group_size: int | None
    seed: int | None
    from_adapter: Path | None
    max_restarts: int | None
    settings: tuple[str, ...]

    def overrides(self) -> dict[str, Any]:
        """Dotted setting -> value, for the flags given."""
        named = {
            "model.name": self.model,
            "data.path": None if self.data is None else str(self.data),
            "lora.rank": self.rank,
            "lora.alpha": self.alpha,
            "num_steps": self.steps,
            "optim.lr": self.lr,
            "rollout.group_size": self.group_size,
            "seed": self.seed,
            "trainer.max_restarts": self.max_restarts,
            "lora.from_adapter": None if self.from_adapter is None else str(self.from_adapter),
        }
        return {key: value for key, value in named.items() if value is not None}


def train(
    flags: TrainFlags,
    *,
    run: Path | None,
    resume: Path | None,
    dry_run: bool,
    at: int | None = None,
    max_hours: float | None = None,
) -> None:
    """Run the command. Raises SkyliteError subclasses; a clean stop by Ctrl-C exits 130, one that --max-hours asked for 0."""
    if resume is not None:
        _refuse_flags_on_resume(flags, run)
    elif at is not None:
        raise ConfigError(
            f"--at {at} chooses a checkpoint of --resume RUN, and no run was given.",
            "Give --resume, or leave --at away.",
        )
    limit = TimeLimit(max_hours) if max_hours is not None else None
    if resume is not None:
        finished = _go_on(flags, RunDir(resume.resolve()), at, limit, dry_run=dry_run)
    else:
        finished = _begin(flags, run, limit, dry_run=dry_run)
    if not finished and not (limit is not None and limit.reached):
        sys.exit(130)


def _begin(flags: TrainFlags, run: Path | None, limit: TimeLimit | None, *, dry_run: bool) -> bool:
    """A new run. Returns whether it finished."""
    from skylite.orchestrator.disk_check import check_disk_space
    from skylite.orchestrator.plan import plan_run, write_run
    from skylite.orchestrator.run_session import run_session

    recipe = find_recipe(flags.recipe) if flags.recipe else default_recipe()
    config = load_config(recipe, flags.overrides(), flags.settings)
    if flags.recipe is None and flags.data is None:
        prepare_default_data(Path(config.data.path))
    plan = plan_run(config, RunDir((run or _new_run(recipe)).resolve()))
    check_disk_space(plan.run, plan.config, plan.resolved)
    if dry_run:
        print_settings(plan.config)
        return True
    # Before anything is written: of two that begin at once, one must find the other's word.
    with lock_folder(plan.run.root), lock_folder(Path(plan.resolved.lora_sync_path)):
        write_run(plan)
        with run_log(plan.run.log_path("skylite")):
            return asyncio.run(run_session(plan, resume=False, limit=limit))


def _go_on(flags: TrainFlags, run: RunDir, at: int | None, limit: TimeLimit | None, *, dry_run: bool) -> bool:
    """A run that is there already. Returns whether it finished."""
    from skylite.orchestrator.disk_check import check_disk_space
    from skylite.orchestrator.resume import plan_resume
    from skylite.orchestrator.run_session import run_session

    recorded = read_run_config(run.config_path)
    require_own_folders(run, recorded)
    with contextlib.ExitStack() as held:
        if (
            not dry_run
        ):  # before the run is looked at: a live one's newest checkpoint is another a moment later
            held.enter_context(lock_folder(run.root))
            held.enter_context(lock_folder(run.adapters(recorded)))
        plan = plan_resume(run, overrides=flags.overrides(), settings=flags.settings, at=at)
        if dry_run:
            print_settings(plan.config)
            return True
        check_disk_space(plan.run, plan.config, plan.resolved)
        with run_log(plan.run.log_path("skylite")):
            return asyncio.run(run_session(plan, resume=True, limit=limit))


def print_settings(config: TrainConfig) -> None:
    """The resolved settings as JSON on stdout."""
    print(config.model_dump_json(indent=1))


def _new_run(recipe: Path) -> Path:
    return Path("runs") / f"{recipe.stem}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_flags_on_resume(flags: TrainFlags, run: Path | None) -> None:
    """What begins a new run cannot go with --resume; of the settings orchestrator/resume.py knows which may change."""
    if flags.from_adapter is not None:
        raise ConfigError(
            "--from-adapter begins a new run with an adapter's weights, --resume goes on with a run as it was: they cannot go together.",
            "Give one of the two.",
        )
    given = (["--recipe"] if flags.recipe else []) + (["--run"] if run else [])
    if given:
        raise ConfigError(
            f"--resume goes on with a run in its own folder, but {', '.join(given)} was given too.",
            "Leave it away.",
        )
