"""Going back to a checkpoint: what a dead attempt left beyond it is put away, so that no stale file is taken for a new one."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from skylite.run.files import TEMPORARY_MARK, atomic_file
from skylite.run.metrics import read_metrics
from skylite.run.run_dir import RunDir, published_versions


def forget_after(run: RunDir, lora_sync_path: Path, step: int) -> int:
    """Remove rollouts, updates, adapters and metrics of steps after `step`, and unfinished files. Returns how many steps went.

    The update file of `step` goes too: the resumed trainer writes it again once its adapter stands, and the parent waits for that.
    """
    for folder, first in ((run.rollouts, step + 1), (run.updates, step)):
        for path in folder.glob("step-*"):
            if int(path.stem.removeprefix("step-")) >= first:
                path.unlink()
    for adapter in published_versions(lora_sync_path):
        if adapter.version > step:
            shutil.rmtree(adapter.path)
    for folder in (run.rollouts, run.updates, run.checkpoints, lora_sync_path):
        for leftover in folder.glob(f".*{TEMPORARY_MARK}*"):
            shutil.rmtree(leftover) if leftover.is_dir() else leftover.unlink()
    lines = read_metrics(run.metrics_path)
    kept = [line for line in lines if line["step"] <= step]
    with atomic_file(run.metrics_path) as temporary:
        temporary.write_text("".join(json.dumps(line) + "\n" for line in kept), encoding="utf-8")
    return len(lines) - len(kept)
