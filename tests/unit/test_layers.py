"""The layers: imports run down only, and the parent's files import no torch, transformers or vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "skylite"
HEAVY = {"torch", "transformers", "vllm", "peft", "reasoning_gym", "math_verify"}
LAYERS = (
    ("entry_point",),
    ("cli",),
    (
        "cli_training",
        "cli_prepare",
        "cli_runs",
        "cli_after_training",
        "cli_env",
        "cli_machine",
    ),
    ("cli_help", "cli_options"),
    ("commands",),
    ("orchestrator",),
    ("export",),
    ("ui",),
    ("report",),
    ("doctor",),
    ("evaluation",),
    ("resources",),
    ("environments",),
    ("engine",),
    ("data",),
    ("rewards",),
    ("loggers",),
    # The trainer's side. The parent starts it by name and never imports it.
    ("trainer",),
    ("model",),
    ("algorithms",),
    ("adapters",),
    ("hub",),
    ("api",),
    ("run",),
    ("vllm_plugin",),
    ("sandbox",),
    ("processes",),
    ("config",),
    ("user_functions", "types"),
    ("errors",),
    ("optional_packages", "untrusted_text", "untrusted_files", "progress_reporting"),
)
"""From top to bottom. A file imports from its own folder and from the rows below."""
TRAINER_SIDE = ("trainer", "model", "algorithms")
FILES = sorted(SOURCE.rglob("*.py"))
PARENT_FILES = [p for p in FILES if p.relative_to(SOURCE).parts[0] not in (*TRAINER_SIDE, "vllm_plugin")]
RANK = {name: number for number, row in enumerate(LAYERS) for name in row}


def upward_imports(own: str, source: str) -> list[str]:
    """The skylite modules that `source`, a file of the layer `own`, imports but must not."""
    parts = [name.split(".") for name in imported(ast.parse(source), top_level_only=False)]
    others = {p[1] for p in parts if p[0] == "skylite" and len(p) > 1 and p[1] != own}
    crosses = {name for name in others if name in TRAINER_SIDE and own not in TRAINER_SIDE}
    return sorted(crosses | {name for name in others if RANK[name] <= RANK[own]})


def imported(tree: ast.AST, *, top_level_only: bool) -> set[str]:
    """Dotted names of imported modules."""
    names = set()
    for node in ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree):
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module == "skylite":
            names |= {f"skylite.{a.name}" for a in node.names if a.name in RANK}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


def layer(path: Path) -> str:
    """Folder or file name directly under skylite/."""
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


@pytest.mark.parametrize("path", FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_down_only(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    found = upward_imports(layer(path), path.read_text())
    assert not found, f"{layer(path)} may not import skylite.{', skylite.'.join(found)}"


def test_every_folder_has_a_layer() -> None:
    assert {layer(p) for p in FILES} - {"__init__"} == set(RANK)


@pytest.mark.parametrize(
    ("own", "line", "found"),
    [
        ("engine", "from skylite.orchestrator.plan import RunPlan", ["orchestrator"]),
        ("run", "import skylite.engine.client", ["engine"]),
        ("algorithms", "def f():\n    from skylite.trainer import step", ["trainer"]),
        ("orchestrator", "from skylite.model.packing import pack", ["model"]),
        ("config", "from skylite import types", []),
        ("trainer", "from skylite.model.policy import Policy", []),
    ],
)
def test_an_upward_import_is_found(own: str, line: str, found: list[str]) -> None:
    assert upward_imports(own, line) == found


@pytest.mark.parametrize("path", PARENT_FILES, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_parent_imports_no_heavy_module(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()), top_level_only=True)}
    assert not roots & HEAVY


@pytest.mark.parametrize("name", ["algorithms"])
def test_algorithms_are_pure_tensors(name: str) -> None:
    """No files, parquet or processes: an algorithm gets everything as arguments."""
    for path in (SOURCE / name).glob("*.py"):
        roots = {n.split(".")[0] for n in imported(ast.parse(path.read_text()), top_level_only=False)}
        assert not roots & {"pyarrow", "pathlib", "os", "json", "transformers", "peft"}, path


def test_help_loads_no_heavy_module() -> None:
    heavy = {"torch", "transformers", "pyarrow", "httpx", "pydantic"}
    code = f"import sys, skylite.cli; print(sorted(set(sys.modules) & {heavy}))"
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.strip()
        == "[]"
    )
