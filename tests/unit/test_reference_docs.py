"""docs/reference matches the code."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest

from skylite.config.algorithm import PRESETS
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


@pytest.mark.parametrize("name", ["cli.md", "config.md"])
def test_generated_pages_are_up_to_date(name: str) -> None:
    assert reference(name) == generator().pages()[name], "stale: run `make docs-reference`"


def test_exactly_the_metrics_of_the_code_are_described() -> None:
    strings = re.findall(
        r'"([a-z]+/[a-z_]+)"', "\n".join(p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py"))
    )
    in_code = {name for name in strings if METRIC.fullmatch(name)} - INTERMEDIATE
    described = set(re.findall(r"`([a-z]+/[a-z_]+)`", reference("metrics.md")))
    assert described == in_code


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
