"""Commands in the running text of the documents: their subcommands and flags exist."""

from __future__ import annotations

import math
import shlex
from pathlib import Path
from typing import Any

import pytest
import typer

from skylite.cli.main import app
from tests.unit.doc_blocks import PAGES, ROOT, inline_commands

GROUP: Any = typer.main.get_command(app)
DOCS = ROOT / "docs"
ALL_PAGES = sorted({*PAGES, *DOCS.glob("*.md"), *(DOCS / "explanation").glob("*.md")})


def unknown(line: str) -> list[str]:
    """The words of a command that the command line does not know. Values may be placeholders like NAME."""
    command, words = GROUP, shlex.split(line)[1:]
    context = command.make_context("skylite", [], resilient_parsing=True)
    while words and hasattr(command, "commands") and not words[0].startswith("-"):
        if words[0] not in command.commands:
            return words[:1]
        command = command.commands[words.pop(0)]
        context = command.make_context(command.name, [], parent=context, resilient_parsing=True)
    flags = {
        flag: param for param in command.get_params(context) for flag in (*param.opts, *param.secondary_opts)
    }
    arguments = [param.nargs for param in command.params if param.param_type_name == "argument"]
    found, places = [], math.inf if -1 in arguments else len(arguments)
    while words:
        word, _, value = words.pop(0).partition("=")
        if word.startswith("-"):
            if word not in flags:
                found.append(word)
            elif not flags[word].is_flag and not value:
                words = words[1:]
        else:
            places -= 1
            found += [word] if places < 0 else []
    return found


@pytest.mark.parametrize("page", ALL_PAGES, ids=lambda p: str(p.relative_to(ROOT)))
def test_commands_in_the_text_exist(page: Path) -> None:
    assert {line: found for line in inline_commands(page) if (found := unknown(line))} == {}


def test_commands_in_the_text_are_found(tmp_path: Path) -> None:
    page = tmp_path / "page.md"
    page.write_text(
        "Run `skylite eval\nRUN --n 4`.\n\n```bash\necho `skylite no`\n```\n\n| `skylite` | `skylited` |\n"
    )
    assert inline_commands(page) == ["skylite eval RUN --n 4", "skylite"]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        ("skylite eval runs/NAME --limit 5 --n N", []),
        ("skylite --version -v", []),
        ("skylite adapters gc RUN", []),
        ("skylite eval RUN --sample 4", ["--sample", "4"]),
        ("skylite adapters clean", ["clean"]),
        ("skylite runs A B", ["B"]),
        ("skylite report A B", []),
    ],
)
def test_unknown_words_are_found(line: str, found: list[str]) -> None:
    assert unknown(line) == found
