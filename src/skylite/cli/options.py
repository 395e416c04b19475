"""Flags and arguments that several commands share."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Annotated

import typer

from skylite.errors import ConfigError
from skylite.ui.logs import set_terminal_level

logger = logging.getLogger(__name__)
RUNS = Path("runs")
"""Where `skylite train` makes new runs."""


def set_level(verbose: bool | None) -> bool | None:
    """What the terminal shows: --verbose, --quiet, or unchanged for None."""
    if verbose is not None:
        set_terminal_level(logging.DEBUG if verbose else logging.WARNING)
    return verbose


def silence_for_json(as_json: bool) -> bool:
    """Show only warnings and errors, on stderr, beside the JSON."""
    if as_json:
        set_terminal_level(logging.WARNING)
    return as_json


Verbose = Annotated[
    bool | None,
    typer.Option("--verbose/--quiet", "-v/-q", callback=set_level,
                 help="-v: also debug messages and times. -q: only warnings and errors. "
                 "Default: neither."),
]  # fmt: skip
"""Works before and after the name of a command: the callback sets the level, commands ignore the value."""
WHICH = "Which adapter"
Model = Annotated[
    str | None,
    typer.Option(help="Base model. Default: that of the run or adapter.", rich_help_panel=WHICH),
]
Step = Annotated[
    int | None,
    typer.Option(help="Adapter version of the run. Default: the newest.", rich_help_panel=WHICH),
]
RunFolder = Annotated[Path, typer.Argument(metavar="RUN", help="A run folder.")]
RunOrNewest = Annotated[
    Path | None, typer.Argument(metavar="RUN", help="A run folder. Default: the newest in ./runs.")
]
AsJson = Annotated[
    bool,
    typer.Option("--json", callback=silence_for_json, help="Print JSON instead, for programs."),
]
"""Commands get the value; the callback silences progress."""


def numbers(text: str) -> tuple[int, ...]:
    """The integers in a text like 1,2. Raises ConfigError."""
    try:
        return tuple(int(part) for part in text.split(",") if part.strip())
    except ValueError:
        raise ConfigError(f"{text!r} is not a list of integers.", "Write it like 1,2.") from None


def newest_run() -> Path:
    """The run in ./runs that was started last; logs its name. Raises ConfigError without one."""
    from skylite.run.run_dir import RunDir  # here, so that --help stays fast

    folders = RUNS.iterdir() if RUNS.is_dir() else ()
    started = {p.stat().st_mtime_ns: p.parent for f in folders if (p := RunDir(f).config_path).is_file()}
    if not started:
        raise ConfigError(f"No run was named, and {RUNS} holds none.", "Name a run folder.")
    newest = started[max(started)]
    logger.info(f"{newest}: the newest run in {RUNS}")
    return newest
