"""`metrics.jsonl`, one line per step, written only by the parent; held-out scores; what each number means."""

from __future__ import annotations

import json
import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.resources import files
from itertools import product
from pathlib import Path
from typing import Any, Literal, get_args

from skylite.config.train import EvalConfig
from skylite.errors import DataError
from skylite.run.files import append_line, atomic_file, write_json
from skylite.run.run_dir import RunDir, numbered_paths
from skylite.untrusted_files import read_bytes, read_text
from skylite.untrusted_text import parse_json

Label = Literal["before", "step", "after"]
"""When a run evaluates on held-out problems."""
DESCRIPTIONS = "metrics.toml"
LARGEST = 1e100
"""Sums of larger numbers and their squares would overflow. They count as missing."""
EVAL_METRIC = "eval/score"
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


def _is_absurd(value: Any) -> bool:
    return isinstance(value, int | float) and abs(value) > LARGEST


def write_score(
    run: RunDir, label: Label, version: int, mean: float, config: EvalConfig, *, is_binary: bool
) -> None:
    """Record a held-out score of the run, next to the parquet file with its completions."""
    facts = {"mean": mean, "is_binary": is_binary, "version": version}
    body = {**facts, "split": config.split, "limit": config.limit}
    write_json(run.evals / f"{label}-v{version:06d}.json", body)


def held_out_scores(run: RunDir, config: EvalConfig) -> dict[int, float]:
    """Version -> mean score, from the run's own evaluations on the problems of `config`.

    Raises DataError for a damaged file.
    """
    scores: dict[int, float] = {}
    results = [numbered_paths(run.evals, f"{label}-v", ".json").values() for label in get_args(Label)]
    for path in (p for paths in results for p in paths):
        try:
            body = parse_json(read_text(path))
            if (body["split"], body["limit"]) == (config.split, config.limit):
                scores[int(body["version"])] = float(body["mean"])
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise DataError(
                f"{path} is not a valid held-out result: {type(error).__name__} {error}.", "Remove that file."
            ) from None
    return scores


def scores_are_binary(run: RunDir) -> bool:
    """Whether all held-out scores of the run are 0 or 1, so that their means are accuracies."""
    files = [numbered_paths(run.evals, f"{label}-v", ".json").values() for label in get_args(Label)]
    for path in (p for paths in files for p in paths):
        try:
            if parse_json(read_text(path)).get("is_binary") is not True:
                return False
        except (OSError, ValueError, AttributeError):
            return False
    return True


def remove_scores_after(run: RunDir, version: int) -> None:
    """Delete the run's own evaluations of versions after `version`."""
    for label, suffix in product(get_args(Label), (".json", ".parquet")):
        for found, path in numbered_paths(run.evals, f"{label}-v", suffix).items():
            if found > version:
                path.unlink()


@dataclass(frozen=True, slots=True, kw_only=True)
class Metric:
    """One metric, in words for the reader."""

    name: str
    meaning: str
    unit: str
    good: str
    """What a healthy run shows."""
    bad: str
    """What another value means."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MetricSection:
    """Metrics under one heading."""

    heading: str
    about: str
    metrics: tuple[Metric, ...]


def metric_sections() -> tuple[MetricSection, ...]:
    """All metrics, in the order of the reference page."""
    tree = tomllib.loads(files("skylite.run").joinpath(DESCRIPTIONS).read_text(encoding="utf-8"))
    return tuple(
        MetricSection(
            heading=heading,
            about=rows.get("about", ""),
            metrics=tuple(Metric(name=name, **row) for name, row in rows.items() if name != "about"),
        )
        for heading, rows in tree.items()
    )


def metrics_by_name() -> dict[str, Metric]:
    """`reward/mean` -> its row. `reward/NAME` stands for each reward function."""
    return {metric.name: metric for section in metric_sections() for metric in section.metrics}
