"""The live panel of a run as an SVG file, drawn from the files of the run.

python -m skylite.ui.export_svg RUN OUT.svg [COLUMNS ROWS]
"""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import Any

from rich.console import Console

from skylite.config.loading import read_run_config
from skylite.errors import DataError
from skylite.evaluation.confidence_interval import mean_score
from skylite.run.metrics_file import null_to_nan, read_metrics
from skylite.run.parquet_file import read_parquet
from skylite.run.run_dir import RunDir, numbered_paths
from skylite.ui.live_panel import CompletionView, LivePanel, ScreenState

COLUMNS, ROWS = 100, 31


def main(arguments: list[str]) -> None:
    run, out, *size = arguments
    columns, rows = (int(size[0]), int(size[1])) if size else (COLUMNS, ROWS)
    config = read_run_config(Path(run) / "config.json").config
    console = Console(
        record=True,
        width=columns,
        height=rows,
        file=io.StringIO(),
        force_terminal=True,
        color_system="truecolor",
    )
    console.print(LivePanel(state_of(RunDir(Path(run)), config.num_steps)))
    console.save_svg(out, title=f"skylite train --rank {config.lora.rank} --alpha {config.lora.alpha:g}")


def state_of(run: RunDir, num_steps: int) -> ScreenState:
    """The screen after the last recorded step. Raises DataError for a run without steps."""
    history = [null_to_nan(m) for m in read_metrics(run.metrics_path)]
    if not history:
        raise DataError(f"{run.metrics_path} contains no step yet.", "Wait for the first step of the run.")
    last = int(history[-1]["step"])
    finished = last >= num_steps
    state = ScreenState(
        num_steps,
        phase="done" if finished else "training",
        detail="" if finished else f"step {last + 1} of {num_steps}",
        history=history,
        sample=_sample_completion(run.rollout_path(last)),
        evaluations={label: text for label in ("before", "after") for text in _evaluation(run, label)},
    )
    # The files record the time of the steps, not of the start.
    state.started -= sum(m["time/step_s"] for m in history)
    return state


def _sample_completion(path: Path) -> CompletionView | None:
    """A correct completion, from a group with wrong ones if possible; None without the file."""
    if not path.is_file():
        return None
    rows = read_parquet(path, ["group", "question", "completion", "answer", "reward"]).to_pylist()
    groups: dict[int, list[dict[str, Any]]] = {}
    for row in rows:
        groups.setdefault(row["group"], []).append(row)
    mixed = next((g for g in groups.values() if len({r["reward"] for r in g}) > 1), rows)
    best = max(mixed, key=lambda r: float(r["reward"]))
    return CompletionView(
        question=best["question"], completion=best["completion"], reward=best["reward"], answer=best["answer"]
    )


def _evaluation(run: RunDir, label: str) -> list[str]:
    """The greedy held-out result as text; empty without one."""
    found = numbered_paths(run.evals, f"{label}-v", ".parquet")
    if not found:
        return []
    rows = read_parquet(found[max(found)], ["reward"])
    score = mean_score([[float(r)] for r in rows["reward"].to_pylist()])
    return [f"greedy {score.name} {score}"]


if __name__ == "__main__":
    main(sys.argv[1:])
