"""Check that the documents name only existing links, files, settings, commands and messages.

    python docs/check_pages.py

Prints each problem, and exits 1 if there is one. `make check` runs it.
"""

from __future__ import annotations

import ast
import re
import shlex
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import typer
from pydantic import BaseModel

from skylite.cli.main import app
from skylite.config.train import TrainConfig

ROOT = Path(__file__).parents[1]
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
"""Has settings of other programs too."""
GENERATED = {ROOT / "docs" / "reference" / "cli.md"}
MAX_README_LINES = 90
MAX_COLUMNS = 110

LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
SPAN = re.compile(r"`([^`\n]+)`")
FILE = re.compile(r"(?:[\w.-]+/)+[\w.-]+\.(?:py|md|toml|svg)|results/\w+\.json")
SETTING = re.compile(r"([a-z_]+)\.([a-z_]+)(?:=.*)?")


def main() -> None:
    checks = (links, files, settings, commands, make_targets, long_lines)
    found = [
        f"{page.relative_to(ROOT)}: {text}" for page in PAGES for check in checks for text in check(page)
    ]
    found += [text for whole in (index, menu, messages, names_in_code) for text in whole()]
    lines = len(text_of(README).splitlines())
    if lines > MAX_README_LINES:
        found.append(f"README.md has {lines} lines, over {MAX_README_LINES}")
    print("\n".join(found) or f"{len(PAGES)} pages: all names exist")
    sys.exit(bool(found))


def links(page: Path) -> Iterator[str]:
    for target in LINK.findall("\n".join(prose(page))):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        path = (page.parent / name).resolve() if name else page
        if not path.exists():
            yield f"{target} does not exist"
        elif anchor and anchor not in anchors(path):
            yield f"{target}: {path.name} has no such heading"


def files(page: Path) -> Iterator[str]:
    homes = (ROOT, SOURCE, page.parent)
    for span in spans(page):
        if "NAME" in span or span.startswith(("runs/", "path/")):
            continue
        for name in FILE.findall(span):
            if not any((home / name).exists() for home in homes):
                yield f"{name} does not exist"


def settings(page: Path) -> Iterator[str]:
    sections = {
        name: set(kind.model_fields)
        for name, field in TrainConfig.model_fields.items()
        if isinstance(kind := field.annotation, type) and issubclass(kind, BaseModel)
    }
    for span in [] if page in CHECKED_ELSEWHERE else spans(page):
        match = SETTING.fullmatch(span)
        if not match or match[1] not in sections or match[2] in ("py", "json", "jsonl", "log", "parquet"):
            continue
        if match[2] not in sections[match[1]]:
            yield f"there is not a setting {span}"


def commands(page: Path) -> Iterator[str]:
    for line in code_lines(page):
        if page in GENERATED or not (found := re.match(r"\s*(skylite [a-z].*)", line)):
            continue
        words = shlex.split(found[1], comments=True)[1:]
        known, flags = flags_of(words)
        if not known:
            yield f"there is no command: {line.strip()}"
        elif unknown := [w for w in words if w.startswith("--") and w.partition("=")[0] not in flags]:
            yield f"{unknown} in: {line.strip()}"


def make_targets(page: Path) -> Iterator[str]:
    targets = set(re.findall(r"^([a-z0-9-]+):", text_of(ROOT / "Makefile"), re.MULTILINE))
    for line in code_lines(page):
        if (found := re.match(r"\s*make ([a-z0-9-]+)", line)) and found[1] not in targets:
            yield f"there is no make target: {line.strip()}"


def long_lines(page: Path) -> Iterator[str]:
    for line in [] if page in GENERATED else prose(page):
        if len(line) > MAX_COLUMNS and not line.startswith(("|", "<!--")):
            yield f"over {MAX_COLUMNS} columns: {line}"


def index() -> Iterator[str]:
    """docs/index.md links every page."""
    page = ROOT / "docs" / "index.md"
    linked = {(page.parent / t.partition("#")[0]).resolve() for t in LINK.findall(text_of(page))}
    for missing in sorted(set((ROOT / "docs").rglob("*.md")) - {page} - linked):
        yield f"docs/index.md does not link {missing.relative_to(ROOT)}"


def menu() -> Iterator[str]:
    """The site's menu has every page once. `make docs` checks links as the site renders them."""
    named = re.findall(r": ([\w/-]+\.md)$", text_of(ROOT / "mkdocs.yml"), re.MULTILINE)
    if sorted(named) != sorted(str(page.relative_to(ROOT)) for page in PAGES):
        yield "mkdocs.yml does not name every page once"


def messages() -> Iterator[str]:
    """Each message in docs/troubleshooting.md is one of the code."""
    for heading in re.findall(r"^### `(.+)`$", text_of(ROOT / "docs" / "troubleshooting.md"), re.MULTILINE):
        parts = [part.strip() for part in heading.split("...") if part.strip()]
        if not any(all(part in text for part in parts) for text in texts_in_code()):
            yield f"docs/troubleshooting.md: no message has: {heading}"


def names_in_code() -> Iterator[str]:
    """Documents that the code names exist."""
    for folder in ("src", "tests", "benchmarks", "recipes", "data_prep"):
        for path in [*(ROOT / folder).rglob("*.py"), *(ROOT / folder).rglob("*.toml")]:
            for name in re.findall(r"\b(?:docs|benchmarks)/[\w/-]+\.md", path.read_text(encoding="utf-8")):
                if not (ROOT / name).exists():
                    yield f"{path.relative_to(ROOT)} names {name}"


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


if __name__ == "__main__":
    main()
