"""The commands that train: train, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from skylite.cli.options import (
    AsJson,
    ChatTemplateFile,
    Loggers,
    RunFolder,
    Settings,
    TemplateArgs,
    Verbose,
    template_settings,
)
from skylite.cli.typer_help import Commands

training_app = Commands("Train")

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


@training_app.command()
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
    """Train a LoRA adapter. Each step samples, scores, updates, then reloads and verifies the adapter."""
    from skylite.cli.train import TrainFlags
    from skylite.cli.train import train as run_train

    flags = TrainFlags(
        recipe=recipe, model=model, data=data, rank=rank, alpha=alpha, steps=steps, epochs=epochs, lr=lr,
        seed=seed, group_size=group_size, from_adapter=from_adapter, max_restarts=max_restarts, log=log,
        reward=tuple(reward or ()), env=env,
        set_flags=(*template_settings(chat_template, template_arg), *(settings or ())),
    )  # fmt: skip
    run_train(flags, run=run, resume=resume, dry_run=dry_run, at=at, max_hours=max_hours)


@training_app.command()
def replay(
    target: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="The step to train again.")],
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="A.B=VALUE",
            help="Name a program that the run uses. Changes no setting. Default: the programs that you named "
            "for earlier runs.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Replay a stored step. Trains it again and compares the adapters: exit 0 if equal, 1 if different."""
    from skylite.cli.replay import replay as run_replay

    run_replay(target, step, tuple(settings or ()), as_json=as_json)
