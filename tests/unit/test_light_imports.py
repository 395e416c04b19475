"""The parent loads neither torch nor vLLM: commands answer at once, and the memory is left to the ranks."""

from __future__ import annotations

import subprocess
import sys

HEAVY = {"torch", "transformers", "vllm", "peft", "reasoning_gym", "math_verify"}
IMPORT_PARENT = f"""
import importlib, pathlib, sys, skylite
source = pathlib.Path(skylite.__file__).parent
for path in sorted(source.rglob("*.py")):
    parts = path.relative_to(source).with_suffix("").parts
    if parts[0] in ("trainer", "model", "algorithms", "notebook") or "plugin" in parts:
        continue
    name = ".".join(("skylite", *parts)).removesuffix(".__init__")
    try:
        importlib.import_module(name)
    except ModuleNotFoundError as error:  # an optional library
        assert not error.name.startswith("skylite"), name
    assert not {HEAVY} & set(sys.modules), (name, {HEAVY} & set(sys.modules))
"""


def loaded_after(code: str) -> set[str]:
    """Names of all modules after the code ran in a new process."""
    done = subprocess.run(
        [sys.executable, "-c", f"{code}\nimport sys; print(*sys.modules)"],
        capture_output=True,
        text=True,
        check=True,
    )
    return set(done.stdout.split())


def test_no_module_of_the_parent_loads_a_heavy_library() -> None:
    assert "skylite.rollout.loop" in loaded_after(IMPORT_PARENT)


def test_help_loads_no_heavy_module() -> None:
    assert not loaded_after("import skylite.cli.main") & (HEAVY | {"pyarrow", "httpx", "pydantic"})
