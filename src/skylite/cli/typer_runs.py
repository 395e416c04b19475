"""The commands that look at runs: watch, report, samples, runs, and adapters list, verify, gc."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import AsJson, RunFolder, RunOrNewest, Verbose, newest_run
from skylite.cli.typer_help import Commands
from skylite.errors import ConfigError

runs_app = Commands("Look at runs")
adapters_app = Commands(
    "Commands", help="List, verify or clean up the published adapters of a run.", no_args_is_help=True
)


@runs_app.command()
def watch(
    target: RunOrNewest = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each step until the run ends.")
    ] = False,
    verbose: Verbose = None,
) -> None:
    """Watch a run, live or finished. Shows progress, curves, warnings and completions from its folder.

    Keys: arrows choose completion and step, b best first, w worst first, s stored order, n newest, q quits.
    Prints lines where there is no terminal.
    """
    from skylite.cli.watch import watch as run_watch

    run_watch(target or newest_run(), as_json=as_json)


@runs_app.command()
def report(
    targets: Annotated[
        list[Path] | None,
        typer.Argument(metavar="RUN...", help="One run folder, or several. Default: the newest."),
    ] = None,
    out: Annotated[
        Path | None, typer.Option(help="The page to write.", show_default="report-RUN.html")
    ] = None,
    png: Annotated[
        Path | None,
        typer.Option(
            metavar="FOLDER", help="Also write each curve as a PNG file into FOLDER. Default: no PNG files."
        ),
    ] = None,
    completions: Annotated[
        int, typer.Option(min=0, help="Maximum completions in the page, over all runs.")
    ] = 4000,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Write a report of one or several runs. One HTML page that needs no network; several are compared."""
    from skylite.cli.report import report as run_report

    run_report(targets or [newest_run()], out=out, png=png, max_completions=completions, as_json=as_json)


@runs_app.command()
def samples(
    target: RunOrNewest = None,
    step: Annotated[
        str, typer.Option(help="Steps, e.g. 1,50,100. Default: the newest; with --prompt all.")
    ] = "",
    held_out: Annotated[
        bool, typer.Option("--held-out", help="Answers to held-out problems; --step is the adapter version.")
    ] = False,
    prompt: Annotated[
        str | None, typer.Option(help="Only this prompt id, or parts of it: train/12. Default: all prompts.")
    ] = None,
    contains: Annotated[
        str | None, typer.Option(help="Only where question or completion contains this. Default: all.")
    ] = None,
    min_reward: Annotated[float, typer.Option(help="Lowest reward.", show_default="any")] = -math.inf,
    max_reward: Annotated[float, typer.Option(help="Highest reward.", show_default="any")] = math.inf,
    best: Annotated[bool, typer.Option("--best", help="Best rewards first.")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="Worst rewards first.")] = False,
    limit: Annotated[int, typer.Option(min=1, help="Maximum completions to print.")] = 5,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Print completions of a run with their rewards."""
    from skylite.cli.samples import SampleFlags
    from skylite.cli.samples import samples as run_samples
    from skylite.report.completions import Filter

    if best and worst:
        raise ConfigError("--best and --worst exclude each other.", "Give one of them.")
    run_samples(
        target or newest_run(),
        SampleFlags(
            steps=_steps(step),
            held_out=held_out,
            filter=Filter(
                prompt=prompt,
                contains=contains,
                min_reward=min_reward,
                max_reward=max_reward,
                order="best" if best else "worst" if worst else "stored",
            ),
            limit=limit,
            as_json=as_json,
        ),
    )


@runs_app.command()
def runs(
    folder: Annotated[
        Path | None, typer.Argument(help="A folder with runs, or one run.", show_default="runs")
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """List runs and their results, the newest first."""
    from skylite.cli.runs import list_runs

    list_runs(folder, as_json=as_json)


def _steps(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"--step {text!r} is not a list of steps.", "Write it like 1,50,100.") from None


@adapters_app.command("verify")
def adapters_verify(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """Check every published adapter against its hashes. Exits 1 if one is damaged."""
    from skylite.cli.adapters import verify

    verify(target, as_json=as_json)


@adapters_app.command("list")
def adapters_list(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """List the published adapters: step, bytes, age, canary gap."""
    from skylite.cli.adapters import list_versions

    list_versions(target, as_json=as_json)


@adapters_app.command("gc")
def adapters_gc(target: RunFolder, as_json: AsJson = False, verbose: Verbose = None) -> None:
    """Delete old adapters and checkpoints. Removes what the keep rules do not need, and unfinished files."""
    from skylite.cli.adapters import gc

    gc(target, as_json=as_json)
