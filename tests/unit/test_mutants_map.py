"""`make mutants` covers every module that it should, with test files that exist."""

from __future__ import annotations

import importlib
import sys
import tomllib
from pathlib import Path
from unittest.mock import MagicMock

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skylite"
PLAN = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text())
FOLDERS = ("algorithms", "adapters", "run")
FILES = (
    "engine/canary.py", "engine/canary_bf16.py", "engine/canary_float32.py", "engine/canary_reading.py",
    "engine/vllm/client.py", "engine/vllm/hang_detection.py",
    "engine/retrying_client.py", "engine/collect_groups.py",
    "rollout/judge_rollouts.py", "trainer/anomaly.py", "trainer/rollout_gaps.py",
)  # fmt: skip


def test_every_module_is_changed() -> None:
    found = {str(p.relative_to(SOURCE)) for folder in FOLDERS for p in (SOURCE / folder).glob("*.py")}
    assert set(PLAN["tests"]) == {p for p in found if not p.endswith("__init__.py")} | set(FILES)


@pytest.mark.parametrize("module", PLAN["tests"])
def test_its_test_files_exist(module: str) -> None:
    assert PLAN["tests"][module]
    for name in PLAN["tests"][module]:
        file, _, function = name.partition("::")
        assert f"def {function or 'test'}" in (ROOT / "tests" / "unit" / f"test_{file}.py").read_text()


@pytest.mark.parametrize("mutant", PLAN.get("explained", []), ids=lambda m: m["before"])
def test_an_explained_mutant_still_exists(mutant: dict[str, str]) -> None:
    lines = [line.strip() for line in (ROOT / mutant["path"]).read_text().splitlines()]
    assert mutant["before"].strip() in lines
    assert mutant["reason"]


@pytest.mark.parametrize(
    ("noticed", "reasons", "enough"),
    [(0.94, ["equivalent"], True), (0.94, ["equivalent", ""], False), (0.95, [""], True), (1.0, [], True)],
)
def test_95_percent_or_an_explanation_of_every_survivor_is_enough(
    noticed: float, reasons: list[str], enough: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(str(ROOT / "benchmarks"))
    monkeypatch.setitem(sys.modules, "mutant_list", MagicMock())  # needs cosmic-ray
    mutants = importlib.import_module("mutants")
    found = {"noticed": noticed, "survivors": [{"reason": reason} for reason in reasons]}
    assert mutants.is_enough(found) is enough
