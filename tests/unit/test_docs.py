"""The documents name only existing links, files, settings, commands and messages. The README is short."""

from __future__ import annotations

import ast
import re
import shlex
from functools import cache
from pathlib import Path

import pytest
import typer
from pydantic import BaseModel

from skylite.cli import app
from skylite.config.train import TrainConfig

ROOT = Path(__file__).parents[2]
SOURCE = ROOT / "src" / "skylite"
README = ROOT / "README.md"
PAGES = sorted(
    [
        README,
        ROOT / "CHANGELOG.md",
        ROOT / "CONTRIBUTING.md",
        ROOT / "SECURITY.md",
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
    ]
)
CHECKED_ELSEWHERE = {ROOT / "docs" / "how-to" / "coming-from.md"}
"""Has settings of other programs too: test_coming_from.py."""
GENERATED = {ROOT / "docs" / "reference" / "cli.md"}
MAX_README_LINES = 90
MAX_COLUMNS = 110
BY_NAME = pytest.mark.parametrize("page", PAGES, ids=lambda p: str(p.relative_to(ROOT)))

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|svg)|results/\w+\.json")
SETTING = re.compile(r"([a-z_]+)\.([a-z_]+)(?:=.*)?")


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def split(page: Path) -> tuple[list[str], list[str]]:
    """The lines of prose and tables, and the lines of fenced and indented code."""
    words, code, fenced = list[str](), list[str](), False
    for line in text_of(page).splitlines():
        if line.startswith("```"):
            fenced = not fenced
        else:
            (code if fenced or line.startswith("    ") else words).append(line)
    return words, code


def prose(page: Path) -> list[str]:
    return split(page)[0]


def spans(page: Path) -> list[str]:
    """Text in backticks outside of code blocks."""
    return SPAN.findall("\n".join(prose(page)))


def code_lines(page: Path) -> list[str]:
    """Lines of code blocks, one for a command over several, and text in backticks."""
    return "\n".join(split(page)[1]).replace("\\\n", "").split("\n") + spans(page)


def anchors(page: Path) -> set[str]:
    """The anchors that GitHub generates for a page's headings."""
    headings = [line.lstrip("#").strip() for line in prose(page) if line.startswith("#")]
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@BY_NAME
def test_relative_links_exist(page: Path) -> None:
    targets = [t for t in LINK.findall("\n".join(prose(page))) if not t.startswith(("http://", "https://"))]
    for target in targets:
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        assert path.exists(), f"{target} does not exist"
        assert not anchor or anchor in anchors(path), f"{target}: {path.name} has no such heading"


@BY_NAME
def test_named_files_exist(page: Path) -> None:
    homes = (ROOT, SOURCE, page.parent)
    for span in spans(page):
        for name in FILE.findall(span):
            if "NAME" in name or span.startswith(("runs/", "path/")):
                continue
            assert any((home / name).exists() for home in homes), f"{name} does not exist"


@BY_NAME
def test_named_settings_exist(page: Path) -> None:
    sections = {
        name: set(kind.model_fields)
        for name, field in TrainConfig.model_fields.items()
        if isinstance(kind := field.annotation, type) and issubclass(kind, BaseModel)
    }
    for span in [] if page in CHECKED_ELSEWHERE else spans(page):
        match = SETTING.fullmatch(span)
        if match and match[1] in sections and match[2] not in ("py", "json", "jsonl", "log", "parquet"):
            assert match[2] in sections[match[1]], f"there is no setting {span}"


@BY_NAME
def test_commands_and_flags_exist(page: Path) -> None:
    for line in code_lines(page):
        if page in GENERATED or not (found := re.match(r"\s*(skylite [a-z].*)", line)):
            continue
        words = shlex.split(found[1], comments=True)[1:]
        known, flags = flags_of(words)
        assert known, f"there is no command: {line.strip()}"
        unknown = [w for w in words if w.startswith("--") and w.partition("=")[0] not in flags]
        assert not unknown, f"{unknown} in: {line.strip()}"


@BY_NAME
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for line in code_lines(page):
        if found := re.match(r"\s*make ([a-z0-9-]+)", line):
            assert found[1] in targets, line


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p not in GENERATED], ids=lambda p: str(p.relative_to(ROOT))
)
def test_lines_are_not_too_long(page: Path) -> None:
    long = [line for line in prose(page) if len(line) > MAX_COLUMNS and not line.startswith(("|", "<!--"))]
    assert not long, long[0]


def test_the_readme_is_short() -> None:
    assert len(text_of(README).splitlines()) <= MAX_README_LINES


def test_the_index_links_every_page() -> None:
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / t.partition("#")[0]).resolve() for t in LINK.findall(text_of(index))}
    assert set((ROOT / "docs").rglob("*.md")) - {index} <= linked


def test_the_sites_menu_has_every_page() -> None:
    """`make docs` also checks links and anchors as the site renders them."""
    named = re.findall(r": ([\w/-]+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    assert {ROOT / name for name in named} == set(PAGES)
    assert len(named) == len(set(named))


def test_messages_in_troubleshooting_match_the_code() -> None:
    for heading in re.findall(r"^### `(.+)`$", text_of(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE):
        parts = [part.strip() for part in heading.split("...") if part.strip()]
        assert any(all(part in text for part in parts) for text in texts_in_code()), (
            f"no message has: {heading}"
        )


@pytest.mark.parametrize("folder", ["src", "tests", "benchmarks", "recipes", "data_prep"])
def test_documents_named_in_code_exist(folder: str) -> None:
    for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.toml")]:
        for name in re.findall(r"\b(?:docs|benchmarks)/[\w/-]+\.md", path.read_text(encoding="utf-8")):
            assert (ROOT / name).exists(), f"{path.relative_to(ROOT)} names {name}"


def flags_of(words: list[str]) -> tuple[bool, set[str]]:
    """Whether `words` begin with a skylite command, and the flags of that command."""
    command = typer.main.get_command(app)
    for word in words:
        commands = getattr(command, "commands", None)
        if commands is None:
            break
        if word not in commands:
            return word.isupper(), set()  # `skylite COMMAND --help`
        command = commands[word]
    return True, {"--help", *(option for param in command.params for option in param.opts)}


@cache
def texts_in_code() -> list[str]:
    """Every string of the source. The values of f-strings are left out."""
    found: list[str] = []
    for path in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.JoinedStr):
                found.append("\0".join(str(v.value) for v in node.values if isinstance(v, ast.Constant)))
            elif isinstance(node, ast.Constant):
                found.append(
                    node.value.decode(errors="replace") if isinstance(node.value, bytes) else str(node.value)
                )
    return found
