"""The commands that train: train, replay."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skylite.cli_options import (
    ChatTemplateFile,
    Loggers,
    RunFolder,
    Settings,
    TemplateArgs,
    Verbose,
    template_settings,
)

training_app = typer.Typer(rich_markup_mode=None)

Environment = Annotated[
    str | None,
    typer.Option("--env", help="Episodes of several turns: guess, calculator, FILE.py:function, ..."),
]
Rewards = Annotated[
    list[str] | None,
    typer.Option(help="gsm8k, math, ... or FILE.py:function, instead of the data's reward. Repeatable."),
]

MaxHours = Annotated[
    float | None,
    typer.Option(min=0, help="Stop before the step that would exceed this time. --resume continues."),
]
MaxRestarts = Annotated[
    int | None, typer.Option(min=0, help="Maximum automatic restarts after a trainer crash.")
]


@training_app.command()
def train(
    recipe: Annotated[
        str | None,
        typer.Option(help="TOML file, or the name of a bundled recipe. Default: the one for this machine."),
    ] = None,
    model: Annotated[str | None, typer.Option(help="Hub id, local folder, or smollm2-135m.")] = None,
    data: Annotated[Path | None, typer.Option(help="Folder written by `skylite prepare`.")] = None,
    rank: Annotated[int | None, typer.Option(help="LoRA rank.")] = None,
    alpha: Annotated[float | None, typer.Option(help="LoRA alpha.")] = None,
    steps: Annotated[int | None, typer.Option(help="Total number of steps.")] = None,
    lr: Annotated[float | None, typer.Option(help="Learning rate.")] = None,
    group_size: Annotated[int | None, typer.Option(help="Completions per prompt.")] = None,
    reward: Rewards = None,
    env: Environment = None,
    seed: Annotated[int | None, typer.Option(help="Seed of data order, sampling and initialisation.")] = None,
    from_adapter: Annotated[
        Path | None, typer.Option(help="Start from the weights in this adapter folder (warm start).")
    ] = None,
    run: Annotated[Path | None, typer.Option(help="Run folder. Default: runs/RECIPE-DATE.")] = None,
    resume: Annotated[
        Path | None, typer.Option(help="Resume this run from its newest valid checkpoint.")
    ] = None,
    at: Annotated[
        int | None,
        typer.Option(min=0, help="With --resume: use the checkpoint of this step; 0 starts the run again."),
    ] = None,
    max_hours: MaxHours = None,
    max_restarts: MaxRestarts = None,
    log: Loggers = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved settings, start nothing.")
    ] = False,
    chat_template: ChatTemplateFile = None,
    template_arg: TemplateArgs = None,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Train a LoRA adapter. Each step samples, scores, updates, then reloads and verifies the adapter."""
    from skylite.commands.train import TrainFlags
    from skylite.commands.train import train as run_train

    flags = TrainFlags(
        recipe=recipe, model=model, data=data, rank=rank, alpha=alpha, steps=steps, lr=lr, seed=seed,
        group_size=group_size, from_adapter=from_adapter, max_restarts=max_restarts, log=log,
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
            "--set", metavar="A.B=VALUE", help="Name a program that the run uses. Changes no setting."
        ),
    ] = None,
    verbose: Verbose = None,
) -> None:
    """Replay a stored step. Trains it again and compares the adapters: exit 0 if equal, 1 if different."""
    from skylite.commands.replay import replay as run_replay

    run_replay(target, step, tuple(settings or ()))
