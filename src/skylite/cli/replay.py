"""Replay a stored step. Trains it again and compares the adapters: exit 0 if equal, 1 if different."""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict, replace
from typing import Annotated

import typer

from skylite.cli.options import AsJson, RunFolder
from skylite.config.loading import change_config, read_run_config
from skylite.config.provenance import NOTHING_TYPED, Provenance, from_command_line
from skylite.errors import ConfigError
from skylite.rollout.replay import ReplayResult, replay_step
from skylite.rollout.trusted_programs import allow_algorithm
from skylite.run.run_dir import RunDir
from skylite.ui.logs import show

NAMES_PROGRAMS = typer.Option(
    "--set",
    metavar="A.B=VALUE",
    help="Name a program that the run uses. Changes no setting. Default: the programs that you named for "
    "earlier runs.",
)


def replay(
    target: RunFolder,
    step: Annotated[int, typer.Option(min=1, help="The step to train again.")],
    set_: Annotated[
        list[str] | None,
        NAMES_PROGRAMS,
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Train the step again and print equal or different. Raises SkyliteError subclasses."""
    run = RunDir(target.resolve())
    programs = allow_programs(run, from_command_line(set_ or ()))
    replayed = asyncio.run(replay_step(run, step, programs))
    if as_json:
        show(json.dumps({"equal": not replayed.differences, **asdict(replayed)}))
    else:
        show(replay_text(replayed))
    if replayed.differences:
        sys.exit(1)


def allow_programs(run: RunDir, provenance: Provenance, command: str = "replay") -> dict[str, str]:
    """Check that advantage and policy loss may run. Returns spec -> sha256 of their files.

    Raises ConfigError if they may not, or if --set changes a setting.
    """
    recorded = read_run_config(run.config_path).config
    if change_config(recorded, provenance) != change_config(recorded, NOTHING_TYPED):
        typed = " ".join(f"--set {name}={word.value}" for name, word in provenance.typed.items())
        raise ConfigError(
            f"skylite {command} uses the run's own settings, and {typed} would change them.",
            "Leave it out; here --set only names a program that the run uses.",
        )
    return allow_algorithm(recorded, replace(provenance, file=run.config_path))


def replay_text(replayed: ReplayResult) -> str:
    """The result as text, with the largest difference of every tensor that differs, largest first."""
    start = f"checkpoint step-{replayed.start:06d}" if replayed.start else "the start of the run"
    over = f"step {replayed.step} again from {start}"
    if not replayed.differences:
        return f"equal: {over} gives the published adapter bit for bit ({replayed.num_tensors} tensors)"
    worst = sorted(replayed.differences.items(), key=lambda item: -item[1])
    lines = [f"  {difference:.3e}  {name}" for name, difference in worst]
    head = (
        f"different: {over} changes {len(worst)} of {replayed.num_tensors} tensors, "
        f"by at most {worst[0][1]:.3e}"
    )
    return "\n".join([head, *lines])
