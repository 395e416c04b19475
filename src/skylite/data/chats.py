"""Questions as people have them: a text, or a chat as a list of {"role": ..., "content": ...}."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from skylite.data.raw_rows import Row
from skylite.errors import DataError
from skylite.types import Message

ROLES: tuple[str, ...] = get_args(get_type_hints(Message)["role"])


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks."""

    system: str
    """The row's own system message; may be empty."""
    turns: list[Message]
    """User and assistant messages; the last is the user's."""
    reply: str
    """An assistant message at the end of the chat, which is the reference answer; may be empty."""


def read_question(row: Row, column: str) -> Question:
    """The question of a row: a text, or a chat. Raises DataError that names row and column."""
    value = row.value(column)
    if not isinstance(value, list):
        return Question("", [{"role": "user", "content": row.text(column)}], "")
    turns = [_message(row, f"{column}[{i}]", turn) for i, turn in enumerate(value)]
    system = ""
    if turns and turns[0]["role"] == "system":
        system = turns.pop(0)["content"]
    reply = ""
    if turns and turns[-1]["role"] == "assistant":
        reply = turns.pop()["content"]
    if not turns or turns[-1]["role"] != "user":
        raise DataError(
            f"{row.where}: the chat in {column!r} has no user message before the answer.",
            "A chat ends with a user message, or with the assistant's reference answer after one.",
        )
    if any(turn["role"] == "system" for turn in turns):
        raise DataError(
            f"{row.where}: the chat in {column!r} has a system message that is not the first.",
            "Put it first, or delete the row.",
        )
    return Question(system, turns, reply)


def _message(row: Row, where: str, turn: Any) -> Message:
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise DataError(
            f"{row.where}: {where} is not a message with 'role' and 'content'.",
            "Give a column of texts, or of chats as lists of such messages.",
        )
    role, content = turn["role"], turn["content"]
    if role not in ROLES:
        raise DataError(
            f"{row.where}: {where} has the role {role!r}; skylite knows {', '.join(ROLES)}.",
            "Delete the row; tool calls are not supported.",
        )
    if not isinstance(content, str) or not content.strip():
        kind = "is empty" if isinstance(content, str) or content is None else f"is {type(content).__name__}"
        raise DataError(
            f"{row.where}: the content of {where} {kind}, not text.",
            "Delete the row; images and tool calls are not supported.",
        )
    more = [name for name, value in turn.items() if name not in ("role", "content") and value]
    if more:
        raise DataError(
            f"{row.where}: {where} also has {more[0]!r}, which the prompt would lose.",
            "Delete that field or the row; tool calls are not supported.",
        )
    return {"role": role, "content": content}
