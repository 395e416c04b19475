"""What is said when a run ends: where things are and what to type next."""

from __future__ import annotations

from pathlib import Path

from skylite.run.run_dir import RunDir, published_versions


def finished_text(run: RunDir, adapters: Path) -> str:
    """The run is done."""
    return f"Done. {_kept(run, adapters)}\n{_commands(run)}"


def stopped_text(run: RunDir, adapters: Path) -> str:
    """The run was stopped by the user, or failed: what was kept."""
    return f"{_kept(run, adapters)}\n{_commands(run)}"


def _kept(run: RunDir, adapters: Path) -> str:
    versions = published_versions(adapters)
    checkpoints = sorted(p.name for p in run.checkpoints.glob("step-*"))
    adapter = f"The adapter is {versions[-1].path}." if versions else "No adapter was published."
    checkpoint = f"The last checkpoint is {checkpoints[-1]}." if checkpoints else "There is no checkpoint yet."
    return f"{adapter} {checkpoint}"


def _commands(run: RunDir) -> str:
    return (
        f"  evaluate  skylite eval {run.root}\n"
        f"  serve     skylite serve {run.root}\n"
        f"  resume    skylite train --resume {run.root} --steps N\n"
        f"  numbers   {run.metrics_path}"
    )
