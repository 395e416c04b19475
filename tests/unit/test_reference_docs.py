"""docs/reference says what the code does. `make check` compares the generated pages."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.config.algorithm import PRESETS
from skylite.hub.outline import model_or_outline
from skylite.hub.resolve import tensor_shapes
from skylite.run.metrics_file import metrics_by_name
from skylite.run.rollout_file import ROLLOUT_SCHEMA
from skylite.run.run_dir import RunDir
from tests.unit.doc_scripts import script

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skylite"
DOCS = ROOT / "docs"
REFERENCE = DOCS / "reference"
GENERATORS = sorted(path.stem for path in DOCS.glob("generate_*.py"))
METRIC = re.compile(
    r"\b(?:adapter|anomaly|canary|completion|critic|groups|judge|loss|mem|mismatch|optim|perf|policy|prompts|rewards?|rollout|staleness|sync"
    r"|time|tokens)/[a-z_]+"
)
INTERMEDIATE = {
    "policy/accuracy",  # becomes eval/score
    "critic/residual",
    "critic/residual_squares",
    "critic/return_squares",
    "critic/tokens",
    "tokens/computed",
    "tokens/s",  # a unit
}
"""Sums from which `trainer/metrics.py` computes other metrics."""
UNITS = {"tokens/s"}


def reference(name: str) -> str:
    return (REFERENCE / name).read_text(encoding="utf-8")


@pytest.mark.parametrize("name", GENERATORS)
def test_make_check_and_make_docs_reference_run_every_generator(name: str) -> None:
    commands = (ROOT / "Makefile").read_text().splitlines()
    assert f"\t$(BIN)/python docs/{name}.py" in commands
    assert f"\t$(BIN)/python docs/{name}.py --check" in commands


def test_check_names_the_stale_pages_and_leaves_them(tmp_path: Path) -> None:
    copy = tmp_path / "docs"
    copy.mkdir()
    for path in (DOCS / "generate_reference.py", DOCS / "write_or_check.py"):
        shutil.copy(path, copy)
    shutil.copytree(REFERENCE, copy / "reference")
    check = [sys.executable, str(copy / "generate_reference.py"), "--check"]
    fresh = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (fresh.returncode, fresh.stdout, fresh.stderr) == (0, "", "")

    (copy / "reference" / "cli.md").unlink()
    (copy / "reference" / "metrics.md").write_text("old")
    stale = subprocess.run(check, capture_output=True, text=True, check=False)
    assert (stale.returncode, stale.stdout, stale.stderr) == (
        1,
        "",
        "The code has changed, and docs/reference/cli.md and docs/reference/metrics.md not with it: "
        "run `make docs-reference`.\n",
    )
    assert (copy / "reference" / "metrics.md").read_text() == "old"


def test_the_shapes_of_what_fits_are_those_of_the_model(tmp_path: Path) -> None:
    """The header that the script writes has the tensors that transformers makes."""
    fits = script("generate_gpu_fit")
    for shape in ("1.5B", "7B"):
        model = fits.write_shapes(tmp_path, shape)
        with model_or_outline(str(model / "config.json")) as whole:
            assert whole == model, "it has weights"
        written = tensor_shapes(model)
        (model / "model.safetensors").unlink()
        with model_or_outline(str(model)) as outline:
            assert tensor_shapes(outline) == written


def test_exactly_the_metrics_of_the_code_are_described() -> None:
    strings = re.findall(
        r'"([a-z]+/[a-z_]+)"', "\n".join(p.read_text(encoding="utf-8") for p in SOURCE.rglob("*.py"))
    )
    in_code = {name for name in strings if METRIC.fullmatch(name)} - INTERMEDIATE - UNITS
    described = {name for name in metrics_by_name() if METRIC.fullmatch(name)}
    assert described == in_code


def test_every_metric_has_a_unit_a_meaning_a_healthy_and_a_bad_value() -> None:
    metrics = metrics_by_name().values()
    assert [m.name for m in metrics if not (m.meaning and m.unit and m.good and m.bad)] == []


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
