"""Files and functions stay short enough to read: 300 lines a file, 50 lines a function."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FILE_LINES = 300
FUNCTION_LINES = 50


def python_files(*folders: str) -> list[Path]:
    return sorted(path for folder in folders for path in (ROOT / folder).rglob("*.py"))


def relative(path: Path) -> str:
    return str(path.relative_to(ROOT))


def long_functions(source: str) -> list[str]:
    """Functions of `source` with more than FUNCTION_LINES lines, not counting decorators."""
    functions = (
        n for n in ast.walk(ast.parse(source)) if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef)
    )
    lines = [(f.name, (f.end_lineno or f.lineno) - f.lineno + 1) for f in functions]
    return [f"{name}: {count} lines" for name, count in lines if count > FUNCTION_LINES]


@pytest.mark.parametrize("path", python_files("src", "tests", "benchmarks", "data_prep"), ids=relative)
def test_no_file_is_too_long(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= FILE_LINES, "split it by subject"


@pytest.mark.parametrize("path", python_files("src", "tests", "benchmarks", "data_prep"), ids=relative)
def test_no_function_is_too_long(path: Path) -> None:
    assert long_functions(path.read_text()) == []


def test_a_long_function_is_found() -> None:
    source = "async def long():\n" + "    pass\n" * FUNCTION_LINES
    assert long_functions(source) == ["long: 51 lines"]
    assert long_functions(source.removesuffix("    pass\n")) == []
