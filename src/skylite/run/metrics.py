"""`metrics.jsonl`: one line a step, written by the parent alone."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skylite.errors import DataError
from skylite.run.files import append_line, atomic_file


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Append one step. JSON has no NaN or infinity: such a value becomes null. Raises WriteFailed, and leaves the file as it was."""
    append_line(path, _line(metrics))


def write_metrics(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these steps. Raises WriteFailed, and leaves the file as it was."""
    with atomic_file(path) as temporary:
        temporary.write_text("".join(f"{_line(metrics)}\n" for metrics in lines), encoding="utf-8")


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines in order, a step that was run again after a resume once, as it was the last time; empty without a file.

    A torn last line is left out. Raises DataError for any other line that is no JSON object.
    """
    if not path.exists():
        return []
    steps: dict[object, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        metrics = _parse(path, number, line)
        # Everything from this step on was done anew.
        steps = {k: m for k, m in steps.items() if m["step"] < metrics["step"]}
        steps[metrics["step"]] = metrics
    return list(steps.values())


def null_to_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's null back to a number that is none, for whoever shows numbers."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def _line(metrics: Mapping[str, Any]) -> str:
    return json.dumps(
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()},
        ensure_ascii=False,
    )


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        metrics = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} line {number} is not JSON: {error}.", "Remove that line.") from None
    if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
        raise DataError(
            f"{path} line {number} is no step's metrics (a JSON object with an integer step).",
            "Remove that line.",
        )
    return metrics
