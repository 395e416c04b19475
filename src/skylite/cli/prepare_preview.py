"""What `skylite prepare` shows of its work, and the question before it replaces other data."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Sequence
from pathlib import Path

from skylite.config.rollout import DataConfig, RolloutConfig
from skylite.data.chat_tokenizer import load_tokenizer, read_template, too_long
from skylite.data.prompts import Chat, Pair, PreparedRow, read_info
from skylite.errors import ConfigError, DataError
from skylite.hub.resolve import resolve_model
from skylite.notes import Note, warning
from skylite.types import Message, Prompt
from skylite.ui.logs import show

SHOWN = 400
"""Characters of a message to show."""
TURNS = 3
"""Messages to show at each end of a long prompt."""


def preview(row: PreparedRow, added: str) -> str:
    """The first training row as the model gets it, and its answer. `added`: the data set's system text."""
    turns = [_turn(message, added) for message in row.messages]
    if len(turns) > 2 * TURNS:
        turns = [*turns[:TURNS], f"  ... {len(turns) - 2 * TURNS} more messages ...", *turns[-TURNS:]]
    answers: dict[str, str] = {}
    if isinstance(row, Prompt):
        answers = {"right answer": row.answer}
    elif isinstance(row, Pair):
        answers = {"chosen": row.chosen, "rejected": row.rejected}
    shown = [f"  {name}: {_short(text)}" for name, text in answers.items() if text]
    what = "chat" if isinstance(row, Chat) else "prompt"
    return "\n".join([f"the first training {what}:", *turns, *shown])


def _turn(message: Message, added: str) -> str:
    is_added = message["role"] == "system" and message["content"] == added
    note = " (in every prompt; --system TEXT changes it)" if is_added else ""
    return f"  {message['role']}{note}: {_short(message['content'])}"


def _short(text: str) -> str:
    lines = text if len(text) <= SHOWN else f"{text[:SHOWN]} ... ({len(text):,} characters)"
    return lines.replace("\n", "\n    ")


def length_note(prompts: Sequence[Prompt], model: str | None) -> Note:
    """How long the prompts are, in tokens of `model` if one is given. Raises ModelError."""
    longest = max(prompts, key=_characters)
    if model is None:
        count = _characters(longest)
        return Note(
            f"the longest prompt, {longest.id}, has {count:,} characters; --model NAME counts its tokens"
        )
    template, limit = read_template(DataConfig()), RolloutConfig().max_prompt_tokens
    with contextlib.closing(load_tokenizer(resolve_model(model).path, template)) as tokenizer:
        counts = too_long(tokenizer, prompts, limit)
        if not counts:
            tokens = len(tokenizer.encode_chats([longest.messages])[0])
            return Note(
                f"no prompt is over {limit} tokens of {model}; {longest.id}, the longest text, has {tokens}"
            )
    name = max(counts, key=lambda prompt: counts[prompt])
    return warning(
        f"{len(counts)} of {len(prompts)} prompts have more than {limit} tokens of {model}, a run's "
        f"default limit; the longest, {name}, has {counts[name]}. `train` needs --set "
        f"rollout.max_prompt_tokens={counts[name]}, or leaves them out with --set "
        "data.filter_overlong_prompts=true"
    )


def _characters(prompt: Prompt) -> int:
    return sum(len(message["content"]) for message in prompt.messages)


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
