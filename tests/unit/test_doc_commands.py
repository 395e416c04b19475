"""Every command of README, quickstart and how-to pages runs here, or a comment says why not (doc_blocks.py).

`skylite train` gets --dry-run: it checks flags, settings, data, reward and model, and starts nothing. Of
a make target only the skylite commands run.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner

from skylite.cli.main import app
from tests.unit.doc_blocks import (
    FILE,
    ON_A_RUN,
    PAGES,
    REASONS,
    ROOT,
    RUN_BY,
    RUN_WITH,
    SHELL,
    Block,
    blocks,
    program_of,
)
from tests.unit.verifiers_cases import add_verifiers

BY_PAGE = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))
WITH_PACKAGES = [p for p in PAGES if any(block.note.startswith(RUN_WITH) for block in blocks(p))]


OWN_FILES: dict[str, Callable[[dict[str, str]], dict[str, str]]] = {
    "my.jsonl": lambda row: row,
    "chats.jsonl": lambda row: {"prompt": row["q"], "completion": row["a"]},
    "preferences.jsonl": lambda row: {"prompt": row["q"], "chosen": row["a"], "rejected": "no"},
}
"""A reader's own files, from a question and an answer."""


@pytest.fixture(scope="module")
def prepared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder as a reader has it: their own rows, and the data of the default recipe."""
    root = tmp_path_factory.mktemp("reader")
    rows = [{"q": f"What is {a} + {b}?", "a": str(a + b)} for a in range(20) for b in range(20)]
    for name, of_row in OWN_FILES.items():
        (root / name).write_text("".join(f"{json.dumps(of_row(row))}\n" for row in rows), encoding="utf-8")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(root)
        run_skylite("skylite prepare gsm8k --synthetic --limit 300 --out data/gsm8k-synthetic")
    shutil.copytree(root / "data" / "gsm8k-synthetic", root / "data" / "gsm8k")
    return root


@pytest.fixture
def reader(prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fresh copy of `prepared` as the working folder, and a user who has named no program yet."""
    shutil.copytree(prepared, tmp_path / "project")
    shutil.copytree(ROOT / "examples", tmp_path / "project" / "examples")
    monkeypatch.chdir(tmp_path / "project")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    monkeypatch.setenv("PATH", f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}")
    return tmp_path / "project"


def run_skylite(line: str) -> None:
    """Run a skylite command in this process. Training only as far as --dry-run."""
    done = CliRunner().invoke(app, dry(line)[1:])
    assert done.exit_code == 0, f"{line}\n{done.output}\n{done.exception!r}"


def dry(line: str) -> list[str]:
    """The words of a skylite command; training only as far as --dry-run."""
    words = shlex.split(line, comments=True)
    return [*words, "--dry-run"] if words[1] == "train" and "--dry-run" not in words else words


def run_block(block: Block) -> None:
    for line in block.commands:
        program = program_of(line)
        if program == "skylite":
            run_skylite(line)
        elif program == "make":
            for recipe_line in recipe_of(line):
                run_skylite(recipe_line)
        elif program == "cd":
            os.chdir(line.split()[1])  # `reader` returns to where the test began
        elif program != ".":  # . .venv/bin/activate
            run_shell(line)


def run_shell(line: str) -> str:
    environ = {name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, check=False, env=environ)
    assert done.returncode == 0, f"{line}\n{done.stdout}{done.stderr}"
    return done.stdout


def recipe_of(line: str) -> list[str]:
    """The skylite commands that a make command would run."""
    words = shlex.split(line, comments=True)
    printed = run_shell(shlex.join([words[0], "-n", "-C", str(ROOT), *words[1:]]))
    found = [text.partition("bin/")[2] for text in printed.splitlines() if "bin/skylite " in text]
    assert found or "bin/" in printed or "Nothing to be done" in printed, printed
    return found


@BY_PAGE
def test_commands_without_a_note_run(page: Path, reader: Path) -> None:
    for block in blocks(page):
        if block.note.startswith(FILE):
            (reader / block.note.removeprefix(FILE)).write_text(block.text, encoding="utf-8")
        elif block.commands and not block.note:
            run_block(block)


@pytest.mark.parametrize("page", WITH_PACKAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_with_a_package_run_where_it_is_installed(
    page: Path, reader: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for block in blocks(page):
        if block.note.startswith(RUN_WITH):
            for package in block.note.removeprefix(RUN_WITH).split(", "):
                need(package, monkeypatch)
            for line in block.commands:
                run_shell(shlex.join(dry(line)))


def need(package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let processes that start from here find the package, or skip the test."""
    if package == "verifiers":
        add_verifiers(monkeypatch)
    elif importlib.util.find_spec(package) is None:
        pytest.skip(f"{package} is not installed: `make test-loggers` runs this test with it")


@BY_PAGE
def test_every_note_is_one_that_is_checked(page: Path) -> None:
    for block in blocks(page):
        if block.note and block.commands:
            reason = block.note.partition(": ")[0]
            known = block.note.startswith((RUN_BY, RUN_WITH)) or reason in (ON_A_RUN, *REASONS)
            assert known, f"{block.where}: doc_blocks.py does not know {block.note!r}"


@BY_PAGE
def test_a_note_that_keeps_a_block_from_running_is_true(page: Path) -> None:
    """Commands that use the packages are a block of their own, which a test can run."""
    for block in blocks(page):
        if block.note == "needs to install packages":
            assert not [line for line in block.commands if program_of(line) == "skylite"], block.where


def test_no_block_is_overlooked() -> None:
    """Blocks that could hold commands and hold none: the diagram of README."""
    without = [b for page in PAGES for b in blocks(page) if b.language in SHELL and not b.commands]
    assert [b.page.name for b in without] == ["README.md"]
    assert "FSDP2 base" in without[0].text


@BY_PAGE
def test_the_named_tests_run_these_commands(page: Path) -> None:
    for block in blocks(page):
        if not block.note.startswith(RUN_BY):
            continue
        source = ""
        for name in block.note.removeprefix(RUN_BY).split(", "):
            path, _, test = name.partition("::")
            text = (ROOT / path).read_text(encoding="utf-8")
            assert test in functions(text), f"{block.where}: {path} has no {test}"
            source += text
        if block.page.name not in source:  # a test that reads the page runs the page's own words
            assert missing(block, source) == [], f"{block.where}: {block.note} has not these words"


def functions(source: str) -> set[str]:
    return {node.name for node in ast.walk(ast.parse(source)) if isinstance(node, ast.FunctionDef)}


def missing(block: Block, source: str) -> list[str]:
    """Verbs and flags of the block's commands that the test's file does not contain as strings."""
    words: set[str] = set()
    for line in block.commands:
        parts = shlex.split(line, comments=True)
        words |= {part.partition("=")[0] for part in parts if part.startswith("--")}
        words |= {parts[1]} if parts[0] in ("skylite", "make", "vllm") else set()
    return sorted(word for word in words if not re.search(rf"[\"' ]{re.escape(word)}[\"' =]", source))


def test_the_agent_of_the_page_is_the_example() -> None:
    page = ROOT / "docs" / "how-to" / "environments.md"
    shown = [block.text for block in blocks(page) if block.note == f"{FILE}agent.py"]
    assert shown == [(ROOT / "examples" / "agent" / "agent.py").read_text(encoding="utf-8")]


def test_a_command_that_fails_is_found(reader: Path) -> None:
    page = ROOT / "README.md"
    for line in ("skylite train --set algorithm.name=grpoo", "skylite prepare none.jsonl", "tail nothing"):
        with pytest.raises(AssertionError, match=re.escape(line)):
            run_block(Block(page, 1, "bash", "", f"{line}\n"))


def test_a_flag_that_the_named_test_does_not_use_is_found() -> None:
    block = Block(ROOT / "README.md", 1, "", "", "skylite eval runs/NAME --limit 5 --n 4\n")
    assert missing(block, 'run("eval", "--limit", "4")') == ["--n"]


def test_blocks_and_their_notes_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Text.\n\n    skylite a \\\n      b\n    # c\n\n- item\n    no block\n\n"
        "<!-- needs a GPU -->\n\n```bash\nmake x\n```\n\n```python\nmake = 1\n```\n\n"
        "    # d\n    export A=1\n\ntext\n\n    A=... skylite e\n\ntext\n\n    a diagram\n"
    )
    found = [(b.line, b.language, b.note, b.commands) for b in blocks(page)]
    assert found == [
        (3, "", "", ["skylite a    b"]),
        (12, "bash", "needs a GPU", ["make x"]),
        (16, "python", "", []),
        (20, "", "", ["export A=1"]),
        (25, "", "", ["A=... skylite e"]),
        (29, "", "", []),
    ]
