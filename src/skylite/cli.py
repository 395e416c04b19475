"""The command line: maps flags to commands. The commands do the heavy imports, so that --help is fast."""

from __future__ import annotations

import platform
import sys
from pathlib import Path
from typing import Annotated

import typer

from skylite import __version__
from skylite.cli_adapters import adapters_app
from skylite.cli_after_training import after_training_app
from skylite.cli_env import env_app
from skylite.cli_help import Commands
from skylite.cli_options import Verbose, numbers, set_level
from skylite.cli_runs import runs_app
from skylite.cli_training import training_app
from skylite.errors import SkyliteError, write_failed
from skylite.processes.import_path import protect_imports
from skylite.ui.logs import configure_logging, show, unforeseen_text

app = Commands(
    "Train",
    name="skylite",
    help="Train a LoRA adapter with reinforcement learning on one machine: "
    "FSDP2 trains, vLLM samples, and every adapter sync is verified.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
)
app.add_typer(training_app)
app.add_typer(env_app, name="env", rich_help_panel="Train")
app.add_typer(runs_app)
app.add_typer(adapters_app, name="adapters", rich_help_panel="Look at runs")
app.add_typer(after_training_app)

RewardSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="A.B=VALUE", help="E.g. reward.answer_pattern=REGEX. Repeatable."),
]


@app.callback(invoke_without_command=True)
def start(
    context: typer.Context,
    version: Annotated[
        bool,
        typer.Option("--version", help="Print the version; with -v those of torch, vLLM and others too."),
    ] = False,
    verbose: Verbose = None,
) -> None:
    """Set up logging before a command runs."""
    if version:
        show(version_text(verbose=bool(verbose)))
        raise typer.Exit
    if context.invoked_subcommand is None:
        context.fail("Missing command.")
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


def version_text(*, verbose: bool) -> str:
    """The version in one line, or a line for each library."""
    if not verbose:
        return f"skylite {__version__}"
    from skylite.processes.machine import library_versions

    versions = {"skylite": __version__, "python": platform.python_version()} | library_versions()
    return "\n".join(f"{name} {found}" for name, found in versions.items())


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
