"""Join a run that trains on several machines, as one of them. It ends with the run.

Waits up to half an hour for the run to start. The machines share the run's folder; the model is under the
same path on each. Exits 1 if the run failed.
"""

from __future__ import annotations

import asyncio
import sys
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from skylite.cli.replay import NAMES_PROGRAMS, allow_programs
from skylite.config.provenance import from_command_line
from skylite.run.run_dir import RunDir
from skylite.ui.logs import show


def worker(
    join: Annotated[Path, typer.Option("--join", metavar="RUN", help="The run's folder.")],
    interface: Annotated[
        str | None,
        typer.Option(help="Network interface of this machine. Default: trainer.interface of the run."),
    ] = None,
    set_: Annotated[list[str] | None, NAMES_PROGRAMS] = None,
) -> None:
    """Compute the ranks of this machine. Raises SkyliteError subclasses."""
    from skylite.rollout.join_run import join_run  # here, so that --help stays fast

    run = RunDir(join.resolve())
    allow = partial(allow_programs, run, from_command_line(set_ or ()), "worker")
    phase = asyncio.run(join_run(run, interface, allow))
    show(f"the run is {phase}")
    if phase in ("failed", "dead"):
        sys.exit(1)
