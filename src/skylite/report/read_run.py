"""What the files of a run say, for `watch`, `report` and `runs`. Reads only; the run may be a stranger's."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, get_args

import pyarrow as pa
import pyarrow.compute as pc

from skylite.api import Run, load_run
from skylite.errors import ConfigError, DataError, SkyliteError
from skylite.evaluation.confidence_interval import MeanScore, mean_score
from skylite.run.metrics_file import Label, read_metrics
from skylite.run.rollout_file import read_columns
from skylite.run.run_dir import RunDir, numbered_paths
from skylite.run.status import ENDED, Status, is_alive, read_status
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldOut:
    """One of the run's own evaluations on its held-out problems."""

    version: int
    """The adapter version, which is the number of steps it was trained."""
    label: str
    """before, step or after."""
    score: MeanScore
    path: Path
    """Parquet file with the completions."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """A run at one moment."""

    name: str
    run: Run
    status: Status | None
    """None before the run has written it."""
    metrics: Sequence[Mapping[str, Any]]
    held_out: Sequence[HeldOut]
    """By version; only the last evaluation of a version."""
    unreadable: Sequence[str]
    """What could not be read, in words."""

    @property
    def files(self) -> RunDir:
        return RunDir(self.run.path)

    @property
    def steps_done(self) -> int:
        return int(self.metrics[-1]["step"]) if self.metrics else 0

    @property
    def phase(self) -> str:
        return self.status.phase if self.status is not None else "unknown"

    @property
    def has_partial_rewards(self) -> bool:
        """Whether a completion got a first score other than 0 and 1: then none is right or wrong."""
        held_out = any(not h.score.is_binary for h in self.held_out)
        return held_out or any(x > 0 for x in self.series("reward/partial_frac"))

    @property
    def state(self) -> str:
        """The phase; "dead" for a run that was killed in any phase."""
        is_dead = (
            self.status is not None and self.phase not in ENDED and not is_alive(self.run.path, self.status)
        )
        return "dead" if is_dead else self.phase

    @property
    def seconds(self) -> float:
        """The time of all recorded steps together."""
        return math.fsum(x for m in self.metrics if math.isfinite(x := number(m, "time/step_s")))

    def series(self, key: str) -> list[float]:
        """The metric of each step, nan where it is missing."""
        return [number(m, key) for m in self.metrics]


def number(metrics: Mapping[str, Any], key: str) -> float:
    """The metric as a float, nan if it is missing or no number."""
    value = metrics.get(key)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        return float(value)
    except OverflowError:
        return math.nan


def read_facts(path: Path) -> RunFacts:
    """Read a run. A damaged part is missing and named in `unreadable`.

    Raises ConfigError if the folder is not a run.
    """
    run, unreadable = load_run(path), list[str]()
    status: Status | None = None
    metrics: list[dict[str, Any]] = []
    held_out: list[HeldOut] = []
    try:
        status = read_status(RunDir(run.path).status_path)
    except ConfigError as error:
        unreadable.append(error.what)
    try:
        metrics = read_metrics(RunDir(run.path).metrics_path)
    except (DataError, OSError) as error:
        unreadable.append(str(error))
    for version, label, file in _evaluation_files(RunDir(run.path)):
        try:
            held_out.append(_held_out(version, label, file))
        except SkyliteError as error:
            unreadable.append(error.what)
        except (OSError, ValueError, KeyError, TypeError) as error:
            unreadable.append(f"{file} is not a readable held-out result: {type(error).__name__} {error}.")
    is_binary = all(found.score.is_binary for found in held_out)  # one word for all of a run
    last = {h.version: replace(h, score=replace(h.score, is_binary=is_binary)) for h in held_out}
    return RunFacts(
        name=run.path.name,
        run=run,
        status=status,
        metrics=metrics,
        held_out=[last[version] for version in sorted(last)],
        unreadable=unreadable,
    )


def age_s(status: Status, now: datetime | None = None) -> float:
    """Seconds since the status was written; nan if its time is unreadable."""
    try:
        written = datetime.fromisoformat(status.updated_at)
        return ((now or datetime.now(UTC)) - written).total_seconds()
    except (ValueError, TypeError):
        return math.nan


def age_text(seconds: float) -> str:
    """`3.2 h`, or `unknown` for nan."""
    if not math.isfinite(seconds):
        return "unknown"
    for size, unit in ((86400, "d"), (3600, "h"), (60, "min")):
        if seconds >= size:
            return f"{seconds / size:.1f} {unit}"
    return f"{max(0.0, seconds):.0f} s"


def _evaluation_files(run: RunDir) -> Iterator[tuple[int, str, Path]]:
    for label in get_args(Label):
        for version, path in numbered_paths(run.evals, f"{label}-v", ".json").items():
            yield version, label, path


def _held_out(version: int, label: str, path: Path) -> HeldOut:
    completions = path.with_suffix(".parquet")
    if completions.is_file():
        score = mean_score(_rewards_by_prompt(completions))
    else:
        body = parse_json(read_text(path))
        score = MeanScore(float(body["mean"]), math.nan, math.nan, 0, is_binary=bool(body["is_binary"]))
    return HeldOut(version=version, label=label, score=score, path=completions)


def _rewards_by_prompt(path: Path) -> list[list[float]]:
    table = read_columns(path, {"prompt_id": pa.string(), "reward": pa.float64()})
    if not table.num_rows or not pc.all(pc.is_finite(table["reward"]), skip_nulls=False).as_py():
        raise ValueError("it has no rows, or a reward that is not finite")
    rewards: dict[str, list[float]] = {}
    for row in table.to_pylist():
        rewards.setdefault(row["prompt_id"], []).append(row["reward"])
    return list(rewards.values())
