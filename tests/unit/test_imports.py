"""The layers: imports run one way, and the parent's files import no torch, transformers or vLLM."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).parents[2] / "src" / "skylite"
HEAVY = {"torch", "transformers", "vllm", "peft", "reasoning_gym", "math_verify"}
LEAVES = {"config", "types", "errors", "run", "plugin_file", "config_files", "lora_modules"}
MAY_IMPORT = {
    "cli": {"commands", "errors"},
    "commands": {"orchestrator", "rollout", "evaluation", "launch", "data", "rewards", "models", "vllm_plugin"} | LEAVES,
    "orchestrator": {"rollout", "evaluation", "launch", "data", "rewards", "models", "ui"} | LEAVES,
    "evaluation": {"rollout"} | LEAVES,
    "rollout": LEAVES,
    "launch": {"vllm_plugin"} | LEAVES,
    "models": {"launch"} | LEAVES,
    "data": {"rewards"} | LEAVES,
    "rewards": LEAVES,
    "ui": {"evaluation"} | LEAVES,
    "training": {"grpo"} | LEAVES,
    "grpo": LEAVES,
    "vllm_plugin": {"run"},
    "run": LEAVES,
    "config": {"errors"},
    "config_files": {"config", "errors"},
    "types": set(),
    "plugin_file": {"errors"},
    "lora_modules": set(),
    "errors": set(),
}
LIGHT = [p for p in sorted(SOURCE.rglob("*.py")) if p.relative_to(SOURCE).parts[0] not in ("training", "grpo", "vllm_plugin")]


def layer(path: Path) -> str:
    """Folder or file name directly under skylite/."""
    return of_config(path.relative_to(SOURCE).parts[0].removesuffix(".py"))


def of_config(name: str) -> str:
    """The sections of the settings are one layer, whichever file they lie in."""
    return "config" if name in ("config_algorithm", "config_lora", "config_section") else name


def imported(tree: ast.AST, *, top_level_only: bool) -> set[str]:
    """Dotted names of imported modules."""
    nodes = ast.iter_child_nodes(tree) if top_level_only else ast.walk(tree)
    names = set()
    for node in nodes:
        if isinstance(node, ast.Import):
            names |= {a.name for a in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            names.add(node.module)
    return names


@pytest.mark.parametrize("path", sorted(SOURCE.rglob("*.py")), ids=lambda p: str(p.relative_to(SOURCE)))
def test_imports_run_one_way(path: Path) -> None:
    if path == SOURCE / "__init__.py":
        return
    own = layer(path)
    for name in imported(ast.parse(path.read_text()), top_level_only=False):
        parts = name.split(".")
        if parts[0] == "skylite" and len(parts) > 1 and parts[1] != own:
            assert of_config(parts[1]) in MAY_IMPORT[own] | {own}, f"{own} may not import skylite.{parts[1]}"


@pytest.mark.parametrize("path", LIGHT, ids=lambda p: str(p.relative_to(SOURCE)))
def test_the_parent_imports_nothing_heavy(path: Path) -> None:
    roots = {name.split(".")[0] for name in imported(ast.parse(path.read_text()), top_level_only=True)}
    assert not roots & HEAVY


def test_help_loads_no_heavy_module() -> None:
    code = "import sys, skylite.cli; print(sorted(set(sys.modules) & {'torch', 'transformers', 'pyarrow', 'httpx', 'pydantic'}))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "[]"
