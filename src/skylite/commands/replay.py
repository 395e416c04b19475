"""`skylite replay`: train a stored step again and compare the adapters."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from skylite.orchestrator.replay import Replayed, replay_step
from skylite.run.run_dir import RunDir


def replay(target: Path, step: int) -> None:
    """Train the step again and print the result; exit 1 if it differs. Raises SkyliteError subclasses."""
    replayed = asyncio.run(replay_step(RunDir(target.resolve()), step))
    print(replay_text(replayed))
    if replayed.differences:
        sys.exit(1)


def replay_text(replayed: Replayed) -> str:
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
