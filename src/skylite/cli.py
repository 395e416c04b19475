"""The command line: maps flags to commands. The commands do the heavy imports, so that --help is fast."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli_after_training import after_training_app
from skylite.cli_env import env_app
from skylite.cli_options import AsJson, RunFolder, Settings, Verbose, numbers, set_level
from skylite.cli_runs import runs_app
from skylite.errors import SkyliteError, write_failed
from skylite.processes.import_path import protect_imports
from skylite.ui.logs import configure_logging, show, unforeseen_text

app = typer.Typer(
    name="skylite",
    help="Train a LoRA adapter with reinforcement learning on one machine: "
    "FSDP2 trains, vLLM samples, and every adapter sync is verified.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,  # importing rich would double the time of --help
)

adapters_app = typer.Typer(
    help="List, verify or clean up the published adapters of a run.",
    no_args_is_help=True,
    rich_markup_mode=None,
)
app.add_typer(adapters_app, name="adapters")
app.add_typer(runs_app)
app.add_typer(env_app, name="env")
app.add_typer(after_training_app)

Rewards = Annotated[
    list[str] | None,
    typer.Option(help="gsm8k, math, ... or FILE.py:function, instead of the data's reward. Repeatable."),
]
Environment = Annotated[
    str | None,
    typer.Option("--env", help="Episodes of several turns: guess, calculator, FILE.py:function, ..."),
]
RewardSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="E.g. reward.answer_pattern=REGEX. Repeatable."),
]


@app.callback()
def start(context: typer.Context, verbose: Verbose = None) -> None:
    """Set up logging before a command runs."""
    configure_logging(info_on_stdout=context.invoked_subcommand == "prepare")
    set_level(verbose)


@app.command()
def prepare(
    target: Annotated[
        str,
        typer.Argument(
            help="gsm8k, reasoning-gym:TASK, a data_prep .py file, or your own .jsonl, .csv or .parquet file."
        ),
    ],
    out: Annotated[Path | None, typer.Option(help="Output folder. Default: data/NAME.")] = None,
    source: Annotated[
        Path | None, typer.Option(help="Folder with the released files, instead of the hub.")
    ] = None,
    synthetic: Annotated[
        bool, typer.Option("--synthetic", help="Generate problems in the format of the data set.")
    ] = False,
    first_source: Annotated[
        bool,
        typer.Option("--first-source", help="Use the first available source: hub, --source, synthetic."),
    ] = False,
    difficulty: Annotated[str, typer.Option(help="Reasoning steps of synthetic problems, e.g. 1,2.")] = "",
    question: Annotated[str | None, typer.Option(help="Question column of your own file.")] = None,
    answer: Annotated[str | None, typer.Option(help="Answer column of your own file.")] = None,
    no_answer: Annotated[
        bool, typer.Option("--no-answer", help="The data has no reference answers: the reward needs none.")
    ] = False,
    reward: Annotated[str | None, typer.Option(help="gsm8k, math, ... or FILE.py:function.")] = None,
    settings: RewardSettings = None,
    limit: Annotated[int | None, typer.Option(min=1, help="Maximum rows of the training split.")] = None,
    seed: Annotated[int, typer.Option(min=0, help="Seed of generation and splits.")] = 0,
    verbose: Verbose = None,
) -> None:
    """Prepare a data set. Writes train, validation and test parquet files and checks every row."""
    from skylite.commands.prepare import prepare as run

    run(
        target,
        out=out,
        source=source,
        synthetic=synthetic,
        first_source=first_source,
        difficulty=numbers(difficulty),
        question=question,
        answer=answer,
        no_answer=no_answer,
        reward=reward,
        settings=tuple(settings or ()),
        limit=limit,
        seed=seed,
    )


@app.command()
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
    max_hours: Annotated[
        float | None,
        typer.Option(min=0, help="Stop before the step that would exceed this time. --resume continues."),
    ] = None,
    max_restarts: Annotated[
        int | None, typer.Option(min=0, help="Maximum automatic restarts after a trainer crash.")
    ] = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Check everything, print the resolved settings, start nothing.")
    ] = False,
    settings: Settings = None,
    verbose: Verbose = None,
) -> None:
    """Train a LoRA adapter. Each step samples, scores, updates, then reloads and verifies the adapter."""
    from skylite.commands.train import TrainFlags
    from skylite.commands.train import train as run_train

    flags = TrainFlags(
        recipe=recipe, model=model, data=data, rank=rank, alpha=alpha, steps=steps, lr=lr, seed=seed,
        group_size=group_size, from_adapter=from_adapter, max_restarts=max_restarts,
        reward=tuple(reward or ()), env=env, set_flags=tuple(settings or ()),
    )  # fmt: skip
    run_train(flags, run=run, resume=resume, dry_run=dry_run, at=at, max_hours=max_hours)


@app.command()
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


@adapters_app.command("verify")
def adapters_verify(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """Check every published adapter against its hashes. Exits 1 if one is damaged."""
    from skylite.commands.adapters import verify

    verify(target, as_json=as_json)


@adapters_app.command("list")
def adapters_list(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """List the published adapters: version, step, bytes, age, canary gap."""
    from skylite.commands.adapters import list_versions

    list_versions(target, as_json=as_json)


@adapters_app.command("gc")
def adapters_gc(target: RunFolder, verbose: Verbose = None) -> None:
    """Delete old adapters and checkpoints. Removes what the keep rules do not need, and unfinished files."""
    from skylite.commands.adapters import gc

    gc(target)


def main() -> None:
    """Run the command line. Every error becomes one message on stderr and a nonzero exit code."""
    protect_imports()
    try:
        app()
    except SkyliteError as error:
        show(f"skylite: {error}", to_stderr=True)
        log_tail = getattr(error, "log_tail", "")
        if log_tail:
            show(f"\nThe last lines of its log:\n{log_tail}", to_stderr=True)
        sys.exit(error.exit_code)
    except OSError as error:
        # Nearly all writes raise WriteFailed; this handles the rest, such as creating a folder.
        show(f"skylite: {write_failed(error)}", to_stderr=True)
        sys.exit(1)
    except Exception as error:  # noqa: BLE001 a sentence for every error; its traceback is saved
        show(f"skylite: {unforeseen_text(error)}", to_stderr=True)
        sys.exit(1)
