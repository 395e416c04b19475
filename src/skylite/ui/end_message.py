"""The message at the end of a run: where its files are and what to type next."""

from __future__ import annotations

import logging
import shlex
from collections.abc import Sequence
from pathlib import Path

from skylite.report.alarms import find_alarms
from skylite.report.read_run import HeldOut, RunFacts
from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.run_dir import RunDir, published_versions

logger = logging.getLogger(__name__)


def log_findings(facts: RunFacts) -> None:
    """Log the alarms of the report as warnings, so that a run that went wrong does not end with "Done."."""
    for alarm in find_alarms(facts.metrics, facts.held_out):
        logger.warning(f"{'alarm: ' if alarm.is_alarm else ''}{alarm.text} (since about step {alarm.since})")


def finished_text(run: RunDir, adapters: Path, held_out: Sequence[HeldOut] = ()) -> str:
    """The message of a finished run. `held_out`: its evaluations."""
    results = [f"  {h.label:<9} {h.score.name} {h.score}" for h in held_out if h.label != "step"]
    return "\n".join(
        [
            "Done.",
            *results,
            *_adapter_lines(run, adapters),
            f"  continue  skylite train --resume {_shell_path(run.root)} --steps N",
        ]
    )


def stopped_text(run: RunDir, adapters: Path) -> str:
    """The message of a run that was stopped or failed.

    A resume trains sampled steps from their stored rollouts, so it saves work without a checkpoint too.
    Where no step was sampled it would save nothing, and could change few settings: a new run is better.
    """
    steps, logs = checkpoint_steps(run), f"  logs      {_shell_path(run.logs)}"
    if not steps and not run.stored_rollouts():
        return "\n".join(
            [
                "No step was sampled, so there is nothing to resume. Start a new run. To use the same --run "
                "again, delete it first:",
                f"  delete    rm -r {_shell_path(run.root)}",
                logs,
            ]
        )
    saved = (
        f"Saved: checkpoint {run.checkpoint_path(steps[-1]).name}."
        if steps
        else "There is no checkpoint yet. A resume starts from step 1 and trains on the stored completions, "
        "without sampling them again. Most settings can change only in a new run."
    )
    resume = f"  resume    skylite train --resume {_shell_path(run.root)}"
    return "\n".join([saved, *_adapter_lines(run, adapters), resume, logs])


def _adapter_lines(run: RunDir, adapters: Path) -> list[str]:
    """Where the newest adapter is, and the commands that use it."""
    versions = published_versions(adapters)
    if not versions:
        return ["  adapter   none published yet"]
    return [
        f"  adapter   {_shell_path(versions[-1].path)}",
        f"  evaluate  skylite eval {_shell_path(run.root)}",
        f"  serve     skylite serve {_shell_path(run.root)}",
        f"  metrics   {_shell_path(run.metrics_path)}",
    ]


def _shell_path(path: Path) -> str:
    """The path to type here: relative inside the working folder, quoted for the shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) and path != here else path))
