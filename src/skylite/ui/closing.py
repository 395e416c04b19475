"""What is said when a run ends: where things are and what to type next."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from pathlib import Path

from skylite.run.run_dir import RunDir, published_versions


def finished_text(run: RunDir, adapters: Path, evaluations: Mapping[str, str] | None = None) -> str:
    """The run is done. `evaluations`: label (before, after) to held-out result, in words."""
    results = [f"  {label:<9} {text}" for label, text in (evaluations or {}).items()]
    return "\n".join(
        [
            "Done.",
            *results,
            *_adapter(run, adapters),
            f"  go on     skylite train --resume {_name(run.root)} --steps N",
        ]
    )


def stopped_text(run: RunDir, adapters: Path) -> str:
    """The run was stopped by the user, or failed: what was kept."""
    checkpoints = sorted(p.name for p in run.checkpoints.glob("step-*"))
    kept = (
        f"Kept: checkpoint {checkpoints[-1]}."
        if checkpoints
        else "There is no checkpoint yet: it goes on from its start."
    )
    resume = f"  resume    skylite train --resume {_name(run.root)}"
    return "\n".join([kept, *_adapter(run, adapters), resume, f"  logs      {_name(run.logs)}"])


def _adapter(run: RunDir, adapters: Path) -> list[str]:
    """Where the newest adapter is and what can be done with it; nothing before it exists."""
    versions = published_versions(adapters)
    if not versions:
        return ["  adapter   none was published"]
    return [
        f"  adapter   {_name(versions[-1].path)}",
        f"  evaluate  skylite eval {_name(run.root)}",
        f"  serve     skylite serve {_name(run.root)}",
        f"  numbers   {_name(run.metrics_path)}",
    ]


def _name(path: Path) -> str:
    """As a person would type it here: relative below the working folder, quoted for the shell."""
    here = Path.cwd()
    return shlex.quote(str(path.relative_to(here) if path.is_relative_to(here) and path != here else path))
