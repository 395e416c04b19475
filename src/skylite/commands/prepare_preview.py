"""What `skylite prepare` shows of its work, and the question before it replaces other data."""

from __future__ import annotations

import sys
from pathlib import Path

from skylite.data.prompts import read_info
from skylite.errors import ConfigError, DataError
from skylite.types import Message, Prompt
from skylite.ui.logs import show

SHOWN = 400
"""Characters of a message to show."""
TURNS = 3
"""Messages to show at each end of a long prompt."""


def preview(prompt: Prompt, added: str) -> str:
    """The first training prompt as the model gets it, and its answer. `added`: the data set's system text."""
    turns = [_turn(message, added) for message in prompt.messages]
    if len(turns) > 2 * TURNS:
        turns = [*turns[:TURNS], f"  ... {len(turns) - 2 * TURNS} more messages ...", *turns[-TURNS:]]
    answer = [f"  right answer: {_short(prompt.answer)}"] if prompt.answer else []
    return "\n".join(["the first training prompt:", *turns, *answer])


def _turn(message: Message, added: str) -> str:
    is_added = message["role"] == "system" and message["content"] == added
    note = " (in every prompt; --system TEXT changes it)" if is_added else ""
    return f"  {message['role']}{note}: {_short(message['content'])}"


def _short(text: str) -> str:
    lines = text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text):,} characters)"
    return lines.replace("\n", "\n    ")


def is_terminal() -> bool:
    """Whether somebody can answer."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def ask_before_replacing(folder: Path, made_by: str) -> None:
    """Ask on a terminal before data that another command made is replaced. Raises ConfigError for a no."""
    try:
        earlier = read_info(folder / "train.parquet").made_by
    except DataError:
        return  # no data of ours; replace_folder refuses a folder with other files
    if earlier == made_by:
        return
    if is_terminal():
        show(f"{folder} holds the data of: {earlier}\nReplace it? [y/N]", to_stderr=True)
        if input().strip().lower() in ("y", "yes"):
            return
    raise ConfigError(
        f"{folder} holds the data of another command: {earlier}.",
        "Give another folder with --out, or --replace.",
    )
