"""The commands about this machine and other services: doctor, log."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.options import AsJson, RunFolder, Verbose
from skylite.cli.typer_help import Commands

machine_app = Commands("Machine and loggers")


@machine_app.command()
def doctor(
    runs: Annotated[Path, typer.Option(help="Folder with runs, to find dead ones.")] = Path("runs"),
    engine: Annotated[
        str | None,
        typer.Option(
            metavar="URL",
            help="Check a running engine instead, e.g. http://127.0.0.1:8000. Default: this machine.",
        ),
    ] = None,
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Check this machine: versions, GPUs, memory, disks, network. Also limits and dead runs.

    Each problem comes with its remedy. Exits 1 if a check fails.
    """
    from skylite.cli.doctor import doctor as run_doctor

    run_doctor(runs=runs, engine=engine, as_json=as_json)


@machine_app.command("log")
def log_run(
    target: RunFolder,
    to: Annotated[str, typer.Option(help="Loggers, e.g. tensorboard,wandb (also trackio, mlflow, swanlab).")],
    as_json: AsJson = False,
    verbose: Verbose = None,
) -> None:
    """Log a run to experiment loggers afterwards. Logs each step once, however often you call it."""
    from skylite.cli.log import log

    log(target, to, as_json=as_json)
