"""`metrics.jsonl`: one line per step, written only by the parent."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from skylite.errors import DataError
from skylite.run.files import append_line, atomic_file
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json

EVAL_METRIC = "eval/reward_mean"
"""The held-out score of the version that a step published, once it is evaluated."""


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Append one step. NaN and infinity become null, because JSON lacks them.

    Raises WriteFailed and leaves the file unchanged.
    """
    append_line(path, metrics_line(metrics))


def write_metrics(path: Path, lines: Iterable[Mapping[str, Any]]) -> None:
    """Replace the file by these steps. Raises WriteFailed and leaves the file unchanged."""
    with atomic_file(path) as temporary:
        temporary.write_text("".join(f"{metrics_line(metrics)}\n" for metrics in lines), encoding="utf-8")


def add_to_step(path: Path, step: int, metrics: Mapping[str, Any]) -> None:
    """Add metrics to the line of a recorded step; a step without a line stays without. Raises WriteFailed."""
    lines = read_metrics(path)
    if any(line["step"] == step for line in lines):
        write_metrics(path, [{**line, **metrics} if line["step"] == step else line for line in lines])


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """The metrics of all steps in order; empty without a file.

    If a step ran again after a resume, only its last metrics count. Skips an incomplete last line.
    Raises DataError for any other line that is not a JSON object with a step.
    """
    if not path.exists():
        return []
    steps: list[dict[str, Any]] = []
    for number, line in enumerate(read_bytes(path).split(b"\n")[:-1], 1):
        metrics = _parse(path, number, line)
        # A repeated step means that the run was resumed there: later steps ran again too.
        while steps and steps[-1]["step"] >= metrics["step"]:
            steps.pop()
        steps.append(metrics)
    return steps


def null_to_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """Convert null back to NaN for code that displays numbers."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def metrics_line(metrics: Mapping[str, Any]) -> str:
    """The JSON of a step in one line, with null for NaN and infinity."""
    return json.dumps(
        {k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()},
        ensure_ascii=False,
    )


def _parse(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        metrics = parse_json(line)
    except ValueError as error:
        raise DataError(f"{path} line {number} is not JSON: {error}.", "Remove that line.") from None
    if not isinstance(metrics, dict) or type(metrics.get("step")) is not int or abs(metrics["step"]) > 2**53:
        raise DataError(
            f'{path} line {number} is not a JSON object with an integer "step".',
            "Remove that line.",
        )
    return {key: None if _is_absurd(value) else value for key, value in metrics.items()}


LARGEST = 1e100
"""Sums of larger numbers and their squares would overflow. They count as missing."""


def _is_absurd(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > LARGEST
