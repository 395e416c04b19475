"""docs/reference matches the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from skylite.config.algorithm import PRESETS
from skylite.run.metric_table import metrics_by_name
from skylite.run.rollout_file import ROLLOUT_SCHEMA
from skylite.run.run_dir import RunDir

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skylite"
REFERENCE = ROOT / "docs" / "reference"
METRIC = re.compile(
    r"\b(?:adapter|anomaly|canary|completion|critic|groups|loss|mem|mismatch|optim|perf|policy|reward|rollout|staleness|sync"
    r"|time|tokens)/[a-z_]+"
)
INTERMEDIATE = {
    "critic/residual",
    "critic/residual_squares",
    "critic/return_squares",
    "critic/tokens",
    "tokens/computed",
}
"""Sums from which `trainer/metrics.py` computes other metrics."""


def generator() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "generate_reference", ROOT / "docs" / "generate_reference.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def reference(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", ["cli.md", "config.md", "metrics.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert reference(name) == generator().pages()[name], "stale: run `make docs-reference`"


def test_exactly_the_metrics_of_the_code_are_described() -> None:
    strings = re.findall(
        r'"([a-z]+/[a-z_]+)"', "\n".join(p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py"))
    )
    in_code = {name for name in strings if METRIC.fullmatch(name)} - INTERMEDIATE
    described = {name for name in metrics_by_name() if METRIC.fullmatch(name)}
    assert described == in_code


def test_every_metric_has_a_unit_and_a_meaning_and_a_bad_value_has_a_healthy_one() -> None:
    metrics = metrics_by_name().values()
    assert [m.name for m in metrics if not m.meaning or not m.unit] == []
    guarded = [m for m in metrics if m.bad]
    assert len(guarded) > 20
    assert [m.name for m in guarded if not m.good and not m.name.startswith("time/")] == []


def test_metrics_that_a_row_names_exist() -> None:
    known = metrics_by_name()
    for metric in known.values():
        for name in METRIC.findall(f"{metric.meaning} {metric.good} {metric.bad}"):
            assert name in known, f"{metric.name} names {name}"


def test_every_path_of_a_run_is_described() -> None:
    run = RunDir(Path("/run"))
    paths = [
        value
        for name in dir(RunDir)
        if isinstance(value := getattr(run, name, None), Path) and name != "root"
    ]
    assert len(paths) > 10
    missing = [
        str(p.relative_to("/run"))
        for p in paths
        if str(p.relative_to("/run")) not in reference("run-directory.md")
    ]
    assert not missing


def test_every_column_of_a_rollout_file_is_described() -> None:
    text = reference("run-directory.md")
    assert [name for name in ROLLOUT_SCHEMA.names if f"`{name}`" not in text] == []


def test_every_preset_has_a_row() -> None:
    rows = re.findall(r"^\| `([^`]+)`", reference("algorithms.md"), re.MULTILINE)
    assert set(PRESETS) <= set(rows)
