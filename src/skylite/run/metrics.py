"""`metrics.jsonl`: one line a step, written by the parent alone."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Mapping
from io import FileIO
from pathlib import Path
from typing import Any

from skylite.errors import DataError
from skylite.run.disk import writing


def append_metrics(path: Path, metrics: dict[str, Any]) -> None:
    """Append one step. JSON has no NaN or infinity: such a value becomes null. Raises WriteFailed, and leaves the file as it was.

    What a parent that was killed while writing left of its last line is cut away first, so that only a last line is ever torn.
    """
    line = json.dumps({k: None if isinstance(v, float) and not math.isfinite(v) else v for k, v in metrics.items()}, ensure_ascii=False)
    with writing(path):
        _cut_torn_line(path)
    with writing(path), path.open("ab", buffering=0) as stream:
        whole = os.fstat(stream.fileno()).st_size
        try:
            _write_all(stream, line.encode() + b"\n")
            os.fsync(stream.fileno())
        except OSError:
            os.truncate(path, whole)
            raise


def read_metrics(path: Path) -> list[dict[str, Any]]:
    """All whole lines in order, a step that was run again after a resume once, as it was the last time; empty without a file.

    A torn last line is left out. Raises DataError for any other line that is no JSON object.
    """
    if not path.exists():
        return []
    steps: dict[object, dict[str, Any]] = {}
    for number, line in enumerate(path.read_bytes().split(b"\n")[:-1], 1):
        metrics = _parsed(path, number, line)
        # Everything from this step on was done anew.
        steps = {k: m for k, m in steps.items() if m["step"] < metrics["step"]}
        steps[metrics["step"]] = metrics
    return list(steps.values())


def with_nan(metrics: Mapping[str, Any]) -> dict[str, Any]:
    """JSON's null back to a number that is none, for whoever shows numbers."""
    return {key: math.nan if value is None else value for key, value in metrics.items()}


def _parsed(path: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        metrics = json.loads(line)
    except ValueError as error:
        raise DataError(f"{path} line {number} is not JSON: {error}.", "Remove that line.") from None
    if not isinstance(metrics, dict) or not isinstance(metrics.get("step"), int):
        raise DataError(f"{path} line {number} is no step's metrics (a JSON object with an integer step).", "Remove that line.")
    return metrics


def _write_all(stream: FileIO, data: bytes) -> None:
    """A disk that fills up takes a part first and refuses the rest."""
    while data:
        data = data[stream.write(data) :]


def _cut_torn_line(path: Path) -> None:
    if not path.exists():
        return
    with path.open("r+b") as stream:
        content = stream.read()
        if not content.endswith(b"\n"):
            stream.truncate(content.rfind(b"\n") + 1)
