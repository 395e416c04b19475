"""The code blocks of a page, with the comment above each that says how it is checked.

    <!-- file: NAME -->               the block is the content of this file, for the commands below it
    <!-- needs a GPU -->              not run here; also: needs the hub, needs to install packages,
                                  needs a running server, needs a second machine; after ": " more words
    <!-- run on a finished run -->    tests/e2e/test_documented_commands.py runs these commands
    <!-- run by PATH::TEST -->        that test runs the same command; several are joined by ", "
    <!-- run with PACKAGE -->         tests/unit/test_doc_commands.py runs it where the packages are installed

tests/unit/test_doc_commands.py runs a block of shell commands without such a comment, and training only
as far as --dry-run.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = sorted(
    [
        ROOT / "README.md",
        ROOT / "docs" / "quickstart.md",
        *(ROOT / "docs" / "how-to").glob("*.md"),
        *(ROOT / "examples").rglob("*.md"),
    ]
)
"""Pages whose commands are checked."""
FILE, RUN_BY, RUN_WITH, ON_A_RUN = "file: ", "run by ", "run with ", "run on a finished run"
REASONS = (
    "needs a GPU",
    "needs the hub",
    "needs to install packages",
    "needs a running server",
    "needs a second machine",
)
NOTE = re.compile(r"<!-- (.+) -->")
SHELL = ("bash", "sh", "")
PROGRAMS = {
    *(
        "skylite",
        "make",
        "python",
        "python3",
        "pip",
        "pipx",
        "uv",
        "vllm",
        "curl",
        "tail",
        "jupyter",
        "docker",
    ),
    *("podman", "git", "trl", "tensorboard", "srun", ".", "cd", "export", "printf"),
}


@dataclass(frozen=True)
class Block:
    """A fenced or indented block."""

    page: Path
    line: int
    language: str
    note: str
    """The comment above it; empty without one."""
    text: str

    @property
    def where(self) -> str:
        return f"{self.page.relative_to(ROOT)}:{self.line}"

    @property
    def commands(self) -> list[str]:
        """Its command lines, if it is shell; continued lines are joined."""
        if self.language not in SHELL:
            return []
        lines = self.text.replace("\\\n", " ").replace(" && ", "\n").splitlines()
        lines = [line for line in lines if line.strip() and not line.startswith("#")]
        return lines if lines and program_of(lines[0]) in PROGRAMS else []


def program_of(line: str) -> str:
    """The first word after assignments such as NAME=VALUE."""
    words = (word for word in line.split() if not re.match(r"\w+=", word))
    return next(words, "")


def inline_commands(page: Path) -> list[str]:
    """The `skylite ...` commands in the running text and tables of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    return [" ".join(found.split()) for found in re.findall(r"`(skylite(?: [^`]+)?)`", text)]


def blocks(page: Path) -> list[Block]:
    """All code blocks of a page."""
    found: list[Block] = []
    lines = page.read_text(encoding="utf-8").splitlines()
    number, note = 0, ""
    while number < len(lines):
        line = lines[number]
        if line.startswith("```"):
            end = lines.index("```", number + 1)
            found.append(
                Block(page, number + 1, line[3:].strip(), note, "\n".join(lines[number + 1 : end]) + "\n")
            )
            number, note = end + 1, ""
        elif line.startswith("    ") and (not number or not lines[number - 1].strip()):
            end = number
            while end < len(lines) and (lines[end].startswith("    ") or not lines[end].strip()):
                end += 1
            text = "\n".join(part[4:] for part in lines[number:end]).rstrip() + "\n"
            found.append(Block(page, number + 1, "", note, text))
            number, note = end, ""
        else:
            if line.strip():
                match = NOTE.fullmatch(line.strip())
                note = match[1] if match else ""
            number += 1
    return found
