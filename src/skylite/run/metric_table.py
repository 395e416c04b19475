"""What each number of metrics.jsonl means: metrics.toml, checked."""

from __future__ import annotations

import tomllib
from dataclasses import dataclass
from importlib.resources import files

FILE = "metrics.toml"


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
    tree = tomllib.loads(files("skylite.run").joinpath(FILE).read_text(encoding="utf-8"))
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
