"""Flags of vLLM's server and the environment variables it reads, from its source: nothing is imported.

    pip download --no-deps --only-binary=:all: --python-version 3.12 --implementation cp \
        --platform manylinux_2_28_x86_64 vllm==0.26.0
    python -m tests.vllm_flags engine-0.26.0-*.whl > tests/vllm_flags_0.26.0.json

vLLM 0.26 is the last release built for torch 2.11.
"""

from __future__ import annotations

import ast
import json
import re
import sys
import zipfile
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

ENGINE = "vllm/engine/arg_utils.py"
FRONTENDS = ("vllm/entrypoints/launchers/cli_args.py", "vllm/entrypoints/openai/cli_args.py")
"""Newer releases have the first, older ones the second."""
VARIABLES, MODES = "vllm/envs.py", "vllm/config/model.py"


def read_source(names: Iterable[str], read: Callable[[str], str]) -> dict[str, list[str]]:
    """Flags, environment variables and kinds of logprobs. `read`: the text of one of the files `names`."""
    engine = ast.parse(read(ENGINE))
    frontend = ast.parse(read(next(name for name in FRONTENDS if name in names)))
    flags = {*added(engine), *added(frontend), *fields(frontend)}
    return {
        "flags": sorted(flags),
        "variables": sorted(n for n in strings(ast.parse(read(VARIABLES))) if n.startswith("VLLM_")),
        "logprobs_modes": sorted(literal(ast.parse(read(MODES)), "LogprobsMode")),
    }


def added(tree: ast.Module) -> Iterator[str]:
    """The flags in calls of `add_argument`."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "add_argument":
            yield from (name for name in strings(*node.args) if re.match(r"--\w", name))


def fields(tree: ast.Module) -> Iterator[str]:
    """The fields of the classes in `cli_args.py`: vLLM makes a flag of each."""
    for node in ast.walk(tree):
        if isinstance(node, ast.ClassDef):
            for field in node.body:
                if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                    yield "--" + field.target.id.replace("_", "-")


def literal(tree: ast.Module, name: str) -> set[str]:
    """The values of `name = Literal[...]`."""
    return next(
        strings(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == name
    )


def strings(*nodes: ast.AST) -> set[str]:
    return {
        each.value
        for node in nodes
        for each in ast.walk(node)
        if isinstance(each, ast.Constant) and isinstance(each.value, str)
    }


def main(wheel: Path) -> dict[str, Any]:
    with zipfile.ZipFile(wheel) as packed:
        found = read_source(packed.namelist(), lambda path: packed.read(path).decode())
    return {"vllm": wheel.name.split("-")[1], **found}


if __name__ == "__main__":
    lines = [f"{json.dumps(key)}: {json.dumps(value)}" for key, value in main(Path(sys.argv[1])).items()]
    print("{" + ",\n ".join(lines) + "}")
