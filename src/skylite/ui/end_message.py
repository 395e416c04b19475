"""The message at the end of a run: where its files are and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from skylite.run.checkpoint_folder import checkpoint_steps
from skylite.run.run_dir import RunDir, published_versions


def finished_text(run: RunDir, adapters: Path, evaluations: Mapping[str, str] | None = None) -> str:
    """The message of a finished run. `evaluations`: label (before, after) -> held-out result."""
    results = [f"  {label:<9} {text}" for label, text in (evaluations or {}).items()]
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
