"""Generated damage to files and JSON trees, and skylite's command line called in this process."""

from __future__ import annotations

import contextlib
import io
import json
import os
import sys
import traceback
from collections.abc import Sequence
from copy import deepcopy
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import typer
from hypothesis import strategies as st

from skylite.cli import main as cli

ODD_VALUES: list[Any] = [
    None,
    True,
    False,
    0,
    -1,
    1,
    10**30,
    -(10**30),
    0.5,
    float("nan"),
    float("inf"),
    -1e308,
    "",
    " ",
    "x",
    "\x00",
    "../..",
    "/dev/null",
    "\ud800",
    "none",
    "a" * 5000,
    [],
    [None],
    [[]],
    [1, "x"],
    {},
    {"": None},
    {"x": {"x": {}}},
    "FILE.py:function",
    "1e400",
]


COMMANDS = typer.main.get_command(cli.app)
"""Typer would build every command again for each call."""


@dataclass(frozen=True, slots=True)
class Reply:
    """How a command ended and what it printed."""

    code: int
    output: str
    """Both streams together."""
    out: str = ""
    """What went to stdout."""


class Stdout(io.StringIO):
    """Standard output that is written to `both` too."""

    def __init__(self, both: io.StringIO) -> None:
        super().__init__()
        self.both = both

    def write(self, text: str) -> int:
        self.both.write(text)
        return super().write(text)


def call(args: Sequence[str]) -> Reply:
    """`skylite ARGS` through its own `main`, in this process."""
    output = io.StringIO()
    stdout = Stdout(output)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(stdout),
        contextlib.redirect_stderr(output),
    ):
        patch.setattr(sys, "argv", ["skylite", *args])
        patch.setattr(cli, "app", COMMANDS)
        patch.setattr(sys, "path", list(sys.path))  # main() changes these three for the rest of the process
        for name in ("PYTHONPATH", "PYTHONSAFEPATH"):
            patch.setenv(name, os.environ.get(name, ""))
        try:
            cli.main()
        except SystemExit as end:
            return Reply(int(end.code or 0), output.getvalue(), stdout.getvalue())
        except Exception:  # noqa: BLE001 what a user would see as a traceback is the finding
            return Reply(-1, output.getvalue() + traceback.format_exc())
    return Reply(0, output.getvalue(), stdout.getvalue())


def printed_json(reply: Reply) -> Any:
    """The JSON object among the lines of the output."""
    return json.JSONDecoder().raw_decode(reply.output, reply.output.index("{\n"))[0]


def snapshot(folder: Path) -> dict[str, tuple[int, int]]:
    """Size and modification time of every path below `folder`."""
    return {
        str(p.relative_to(folder)): (p.stat().st_size, p.stat().st_mtime_ns)
        for p in sorted(folder.rglob("*"))
    }


@st.composite
def damaged_bytes(draw: st.DrawFn, good: bytes) -> bytes:
    """`good` with bytes cut, changed, doubled or inserted, or other bytes. Never equal to `good`."""
    kind = draw(st.sampled_from(["cut", "flip", "remove", "insert", "double", "other", "zeros"]))
    at = draw(st.integers(0, max(0, len(good) - 1)))
    length = draw(st.integers(1, 64))
    some = draw(st.binary(min_size=1, max_size=64))
    damaged = {
        "cut": good[:at],
        "flip": good[:at] + some + good[at + len(some) :],
        "remove": good[:at] + good[at + length :],
        "insert": good[:at] + some + good[at:],
        "double": good[:at] + good[at : at + length] + good[at:],
        "other": some,
        "zeros": good[:at] + bytes(length) + good[at + length :],
    }[kind]
    return damaged if damaged != good else good[: len(good) // 2]


@st.composite
def damaged_tree(draw: st.DrawFn, tree: Any) -> Any:
    """A JSON tree with one to three nodes replaced, removed, renamed or inserted."""
    tree = deepcopy(tree)
    for _ in range(draw(st.integers(1, 3))):
        node, key = draw(st.sampled_from(_places(tree))) if _places(tree) else (None, None)
        if node is None:
            return draw(st.sampled_from(ODD_VALUES))
        action = draw(st.sampled_from(["replace", "remove", "rename"]))
        if action == "replace":
            node[key] = deepcopy(draw(st.sampled_from(ODD_VALUES)))
        elif action == "remove":
            del node[key]
        elif isinstance(node, dict):
            node[draw(st.sampled_from(["", "x", "rnk", "ranks", "\x00"])) + str(key)] = node.pop(key)
    return tree


@st.composite
def damaged_json(draw: st.DrawFn, tree: Any) -> bytes:
    """A JSON document with a damaged tree or damaged bytes."""
    good = json.dumps(tree).encode()
    if draw(st.booleans()):
        return draw(damaged_bytes(good))
    changed = json.dumps(draw(damaged_tree(tree))).encode()
    return changed if changed != good else good[:-1]


def toml_text(tree: dict[str, Any]) -> str:
    """A tree of sections as TOML. JSON's scalars and lists are valid TOML, except null."""
    lines = [f"{json.dumps(k)} = {_toml(v)}" for k, v in tree.items() if not isinstance(v, dict)]
    for name, section in tree.items():
        if isinstance(section, dict):
            lines += [f"[{json.dumps(name)}]", *(f"{json.dumps(k)} = {_toml(v)}" for k, v in section.items())]
    return "\n".join(lines) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, float) and (value != value or abs(value) == float("inf")):
        return "nan" if value != value else "inf"
    if isinstance(value, dict):
        return "{" + ", ".join(f"{json.dumps(k)} = {_toml(v)}" for k, v in value.items()) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(_toml, value)) + "]"
    return '"none"' if value is None else json.dumps(value)


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """(container, key) of every node except the root."""
    if isinstance(tree, dict):
        return [(tree, k) for k in tree] + [p for v in tree.values() for p in _places(v)]
    if isinstance(tree, list):
        return [(tree, i) for i in range(len(tree))] + [p for v in tree for p in _places(v)]
    return []
