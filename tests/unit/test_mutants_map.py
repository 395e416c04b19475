"""`make mutants` covers every module that it should, with test files that exist."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skylite"
PLAN = tomllib.loads((ROOT / "benchmarks" / "mutants.toml").read_text())
FOLDERS = ("algorithms", "adapters", "run")
FILES = (
    "engine/canary.py", "engine/canary_bf16.py", "engine/canary_reading.py", "engine/client.py",
    "engine/hang_detection.py", "engine/retrying_client.py", "engine/collect_groups.py", "trainer/anomaly.py",
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
