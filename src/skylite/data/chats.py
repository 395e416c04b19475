"""Questions as people have them: a text, or a chat as a list of {"role": ..., "content": ...}."""

from __future__ import annotations

import ast
import re
from dataclasses import dataclass
from typing import Any, get_args, get_type_hints

from skylite.data.raw_rows import Row
from skylite.errors import DataError
from skylite.types import Message
from skylite.untrusted_text import parse_json

ROLES: tuple[str, ...] = get_args(get_type_hints(Message)["role"])
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Names of roles in ShareGPT's chats, whose messages have 'from' and 'value'."""
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:""")
_TOOLS = (
    "Delete the row. Tool calls are not supported in data; an environment has tools "
    "(docs/how-to/environments.md)."
)


@dataclass(frozen=True, slots=True)
class Question:
    """What a row asks."""

    system: str
    """The row's own system message; may be empty."""
    turns: list[Message]
    """User and assistant messages; the last is the user's."""
    reply: str
    """An assistant message at the end of the chat, which is the reference answer; may be empty."""


def is_chat_as_text(value: Any) -> bool:
    """Whether a value is a chat in JSON or as Python prints it, as spreadsheets hold them."""
    return isinstance(value, str) and _CHAT_AS_TEXT.match(value) is not None


def chat_value(row: Row, column: str) -> Any:
    """The value of a column; a chat that is stored as text, JSON or Python's, as the list that it is."""
    value = row.value(column)
    if not is_chat_as_text(value):
        return value
    for parse in (parse_json, ast.literal_eval):
        try:
            found = parse(value)
        except (ValueError, SyntaxError, MemoryError, RecursionError):
            continue
        if isinstance(found, list):
            return found
    raise DataError(
        f"{row.where}: {column!r} looks like a chat stored as text, but is neither JSON nor Python.",
        "Write the column as a list of messages, to .jsonl or .parquet, or as JSON text.",
    )


def read_question(row: Row, column: str) -> Question:
    """The question of a row: a text, or a chat. Raises DataError that names row and column."""
    value = chat_value(row, column)
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


def read_answer(row: Row, column: str) -> str:
    """The text of an answer; a chat of one assistant message, as TRL's completion, is its content."""
    value = chat_value(row, column)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        turn = _message(row, f"{column}[0]", value[0])
        if turn["role"] == "assistant":
            return turn["content"].strip()
    return row.text(column)


def _message(row: Row, where: str, turn: Any) -> Message:
    if isinstance(turn, dict) and turn.keys() >= {"from", "value"}:
        turn = {"role": SHAREGPT.get(str(turn["from"]), turn["from"]), "content": turn["value"]} | {
            name: value for name, value in turn.items() if name not in ("from", "value")
        }
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise DataError(
            f"{row.where}: {where} is not a message with 'role' and 'content', or with 'from' and 'value'.",
            "Give a column of texts, or of chats as lists of such messages.",
        )
    role, content = turn["role"], _text_of_parts(turn["content"])
    if role not in ROLES:
        raise DataError(
            f"{row.where}: {where} has the role {role!r}; skylite knows {', '.join(ROLES)}.",
            "Rename it to system." if role == "developer" else _TOOLS,
        )
    if turn.get("tool_calls"):
        raise DataError(f"{row.where}: {where} has tool calls.", _TOOLS)
    if not isinstance(content, str) or not content.strip():
        kind = "is empty" if isinstance(content, str) or content is None else f"is {type(content).__name__}"
        raise DataError(
            f"{row.where}: the content of {where} {kind}, not text.",
            "Give a text, or parts that are all {'type': 'text', 'text': ...}; images are not supported.",
        )
    more = [name for name, value in turn.items() if name not in ("role", "content") and value]
    if more:
        raise DataError(
            f"{row.where}: {where} also has {more[0]!r}, which the prompt would lose.",
            "Delete that field or the row.",
        )
    return {"role": role, "content": content}


def _text_of_parts(content: Any) -> Any:
    """The joined text of content parts if all are text; other content unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [
        part.get("text")
        for part in content
        if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str)
    ]
    return "".join(text for text in texts if text) if len(texts) == len(content) else content
