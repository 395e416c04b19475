"""Train a LoRA adapter. Each step samples, scores, updates, then reloads and verifies the adapter."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer

from skylite.cli.log import logger_names
from skylite.cli.options import ChatTemplateFile, Loggers, Settings, TemplateArgs, Verbose, template_settings
from skylite.cli.own_data_sizes import size_by_data
from skylite.cli.train_defaults import default_data, default_recipe, find_recipe, is_own_data_recipe
from skylite.config.loading import is_set, load_config, read_run_config
from skylite.config.train import TrainConfig
from skylite.data.prompt_order import steps_per_epoch
from skylite.errors import ConfigError
from skylite.notes import Note
from skylite.rollout.plan import RunPlan
from skylite.rollout.shutdown import TimeLimit
from skylite.run.own_folders import lock_run, require_own_folders
from skylite.run.run_dir import RunDir
from skylite.ui.logs import run_log, show, show_printed
from skylite.user_functions import EPISODE, REWARD

logger = logging.getLogger(__name__)


WHAT, LENGTH, UPDATE, RUN, SAFETY = (
    "Model, data and reward", "Length", "Update", "Run folder and resume", "Checks and limits",
)  # fmt: skip


def option(heading: str, text: str, default: str, *names: str, **settings: Any) -> Any:
    """A flag with its heading in --help and its default in words."""
    return typer.Option(*names, help=text, show_default=default, rich_help_panel=heading, **settings)


def setting(heading: str, text: str, default: str, **settings: Any) -> Any:
    """A flag that replaces a setting of the recipe. `default`: that of skylite.config."""
    return option(heading, text, f"the recipe's, else {default}", **settings)


Recipe = Annotated[
    str | None,
    option(WHAT, "TOML or YAML file, or the name of a bundled recipe.", "the bundled one for this machine"),
]
Model = Annotated[
    str | None,
    setting(WHAT, "Hub id (gated: first `hf auth login`), local folder, or smollm2-135m.", "smollm2-135m"),
]
Data = Annotated[Path | None, setting(WHAT, "Folder written by `skylite prepare`.", "data/gsm8k")]
Rewards = Annotated[
    list[str] | None,
    option(WHAT, "gsm8k, math, ... or FILE.py:function. Repeatable.", "the recipe's, else the data's"),
]
Environment = Annotated[
    str | None,
    setting(WHAT, "Episodes of several turns: guess, FILE.py:function, verifiers:NAME, ...", "one turn"),
]
FromAdapter = Annotated[
    Path | None, setting(WHAT, "Warm start from the weights in this adapter folder.", "a new adapter")
]
Steps = Annotated[int | None, setting(LENGTH, "Total number of steps.", "100")]
Epochs = Annotated[
    float | None,
    option(LENGTH, "Passes over the training prompts, instead of --steps; e.g. 0.5.", "--steps counts"),
]
MaxHours = Annotated[
    float | None,
    option(LENGTH, "Stop before the step that would exceed these hours.", "no limit", min=0),
]
Rank = Annotated[int | None, setting(UPDATE, "LoRA rank.", "32")]
Alpha = Annotated[float | None, setting(UPDATE, "LoRA alpha.", "32")]
LearningRate = Annotated[float | None, setting(UPDATE, "Learning rate.", "2e-05")]
GroupSize = Annotated[int | None, setting(UPDATE, "Completions per prompt.", "8")]
Seed = Annotated[int | None, setting(UPDATE, "Seed of data order, sampling and initialisation.", "0")]
Run = Annotated[
    Path | None,
    option(RUN, "Folder of the new run.", "runs/RECIPE-DATE; runs/DATA-DATE with --data and no recipe"),
]
Resume = Annotated[
    Path | None, option(RUN, "Resume this run from its newest valid checkpoint.", "start a new run")
]
At = Annotated[
    int | None,
    option(
        RUN, "With --resume: use the checkpoint of this step; 0 starts the run again.", "the newest", min=0
    ),
]
MaxRestarts = Annotated[
    int | None, setting(SAFETY, "Maximum automatic restarts after a trainer crash.", "0", min=0)
]
DryRun = Annotated[
    bool,
    typer.Option(
        "--dry-run",
        help="Check everything, print the resolved settings, start nothing.",
        rich_help_panel=SAFETY,
    ),
]


def train(
    recipe: Recipe = None,
    model: Model = None,
    data: Data = None,
    reward: Rewards = None,
    env: Environment = None,
    from_adapter: FromAdapter = None,
    steps: Steps = None,
    epochs: Epochs = None,
    max_hours: MaxHours = None,
    rank: Rank = None,
    alpha: Alpha = None,
    lr: LearningRate = None,
    group_size: GroupSize = None,
    seed: Seed = None,
    run: Run = None,
    resume: Resume = None,
    at: At = None,
    max_restarts: MaxRestarts = None,
    log: Loggers = None,
    dry_run: DryRun = False,
    chat_template: ChatTemplateFile = None,
    template_arg: TemplateArgs = None,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """The flags of `skylite train`."""
    flags = TrainFlags(
        recipe=recipe, model=model, data=data, rank=rank, alpha=alpha, steps=steps, epochs=epochs, lr=lr,
        seed=seed, group_size=group_size, from_adapter=from_adapter, max_restarts=max_restarts, log=log,
        reward=tuple(reward or ()), env=env,
        set_flags=(*template_settings(chat_template, template_arg), *(settings or ())),
    )  # fmt: skip
    run_train(flags, run=run, resume=resume, dry_run=dry_run, at=at, max_hours=max_hours)


FLAGS = {
    "model.name": "model",
    "data.path": "data",
    "lora.rank": "rank",
    "lora.alpha": "alpha",
    "num_steps": "steps",
    "num_epochs": "epochs",
    "optim.lr": "lr",
    "rollout.group_size": "group_size",
    "seed": "seed",
    "trainer.max_restarts": "max_restarts",
    "log.to": "log",
    "lora.from_adapter": "from_adapter",
}
"""Dotted setting -> the flag that sets it, as a field of TrainFlags."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainFlags:
    """The flags of `skylite train` that set one setting each; None if not given."""

    recipe: str | None
    model: str | None
    data: Path | None
    rank: int | None
    alpha: float | None
    steps: int | None
    epochs: float | None
    lr: float | None
    group_size: int | None
    seed: int | None
    from_adapter: Path | None
    max_restarts: int | None
    log: str | None
    reward: tuple[str, ...]
    env: str | None
    set_flags: tuple[str, ...]
    """--set"""

    @property
    def settings(self) -> tuple[str, ...]:
        """--set, with --reward and --env among them: all are the user's own word for a program."""
        given = self.set_flags
        if self.env is not None:
            given = (*given, f"{EPISODE.setting}={json.dumps(self.env, ensure_ascii=False)}")
        if not self.reward:
            return given
        if is_set(self.set_flags, REWARD.setting):
            raise ConfigError(
                f"--reward and --set {REWARD.setting} both choose the reward functions.",
                "Remove one of them.",
            )
        return (*given, f"{REWARD.setting}={json.dumps(self.reward, ensure_ascii=False)}")

    def overrides(self) -> dict[str, Any]:
        """Dotted setting -> value, for the given flags."""
        values = {key: getattr(self, name) for key, name in FLAGS.items()}
        given = {key: value for key, value in values.items() if value is not None}
        if self.log is not None:
            given["log.to"] = logger_names(self.log)
        return {key: str(value) if isinstance(value, Path) else value for key, value in given.items()}

    def names(self) -> dict[str, str]:
        """Dotted setting -> the flag that gave it, such as lora.rank -> --rank."""
        return {key: f"--{FLAGS[key].replace('_', '-')}" for key in self.overrides()}


def run_train(
    flags: TrainFlags,
    *,
    run: Path | None,
    resume: Path | None,
    dry_run: bool,
    at: int | None = None,
    max_hours: float | None = None,
) -> None:
    """Train, or resume a run. Raises SkyliteError subclasses.

    Exits 130 after a clean stop by Ctrl-C, and 0 after a stop by --max-hours.
    """
    if resume is not None:
        _refuse_flags_on_resume(flags, run)
    elif at is not None:
        raise ConfigError(
            f"--at {at} chooses a checkpoint of the run to resume, but --resume is missing.",
            "Add --resume RUN, or remove --at.",
        )
    limit = TimeLimit(max_hours) if max_hours is not None else None
    if dry_run:
        show_printed()
    if resume is not None:
        finished = _resume(flags, RunDir(resume.resolve()), at, limit, dry_run=dry_run)
    else:
        finished = _start(flags, run, limit, dry_run=dry_run)
    if not finished and not (limit is not None and limit.reached):
        sys.exit(130)


def _start(flags: TrainFlags, run: Path | None, limit: TimeLimit | None, *, dry_run: bool) -> bool:
    """Start a new run. Returns whether it finished."""
    from skylite.rollout.disk_check import check_disk_space
    from skylite.rollout.failures import failures_recorded
    from skylite.rollout.plan import plan_run, write_run
    from skylite.rollout.run_session import run_session

    recipe = find_recipe(flags.recipe) if flags.recipe else default_recipe(flags.data)
    config = load_config(recipe, flags.overrides(), flags.settings, flags.names())
    follows_data = is_own_data_recipe(recipe)
    name = Path(config.data.path).resolve().name if follows_data else recipe.stem
    run_dir = RunDir((run or _new_run(name)).resolve())
    is_default = flags.recipe is None and flags.data is None
    with default_data(config, keep=not dry_run) if is_default else contextlib.nullcontext(config) as readable:
        sizes: list[Note] = []
        if follows_data:
            from skylite.processes.hardware import choose_device

            readable, sizes = size_by_data(readable, gpu=choose_device() == "cuda")
        plan = plan_run(
            readable, run_dir, recipe=recipe, settings=flags.settings, flags=flags.overrides(), notes=sizes
        )
    steps_per_epoch(len(plan.train), plan.config.rollout.prompts_per_step)  # refuses too few prompts
    check_disk_space(plan.run, plan.config, plan.resolved)
    if dry_run:
        shown = plan.config.data.model_copy(update={"path": config.data.path})
        print_settings(plan.config.model_copy(update={"data": shown}))
        logger.info(ready_text(plan))
        return True
    # Lock before writing: of two processes that start at once, one must see the lock of the other.
    with lock_run(plan.run.root, Path(plan.resolved.lora_sync_path), config.lora):
        write_run(plan)
        with failures_recorded(plan), run_log(plan.run.log_path("skylite")):
            return asyncio.run(run_session(plan, resume=False, limit=limit))


def _resume(
    flags: TrainFlags, run: RunDir, at: int | None, limit: TimeLimit | None, *, dry_run: bool
) -> bool:
    """Resume an existing run. Returns whether it finished."""
    from skylite.rollout.disk_check import check_disk_space
    from skylite.rollout.failures import failures_recorded
    from skylite.rollout.resume import plan_resume
    from skylite.rollout.run_session import run_session

    recorded = read_run_config(run.config_path)
    require_own_folders(run, recorded)
    with contextlib.ExitStack() as locks:
        if not dry_run:  # before reading the run: a live one may write a newer checkpoint at any moment
            locks.enter_context(lock_run(run.root, run.adapters(recorded), recorded.config.lora))
        plan = plan_resume(run, overrides=flags.overrides(), settings=flags.settings, at=at)
        if dry_run:
            print_settings(plan.config)
            logger.info(ready_text(plan))
            return True
        check_disk_space(plan.run, plan.config, plan.resolved)
        with failures_recorded(plan), run_log(plan.run.log_path("skylite")):
            return asyncio.run(run_session(plan, resume=True, limit=limit))


def print_settings(config: TrainConfig) -> None:
    """Print the resolved settings as JSON on stdout."""
    # json.dumps escapes control characters, which `show` would replace by spaces.
    show(json.dumps(config.model_dump(mode="json"), indent=1))


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
    return Path("runs") / f"{name}-{time.strftime('%Y%m%d-%H%M%S')}"


def _refuse_flags_on_resume(flags: TrainFlags, run: Path | None) -> None:
    """Refuse flags that start a new run. rollout/resume.py checks the settings."""
    if flags.from_adapter is not None:
        raise ConfigError(
            "--from-adapter starts a new run and --resume continues one; they cannot be combined.",
            "Remove one of them.",
        )
    given = (["--recipe"] if flags.recipe else []) + (["--run"] if run else [])
    if given:
        raise ConfigError(
            f"--resume continues a run with its recipe and folder, but {', '.join(given)} was given too.",
            "Remove it.",
        )
