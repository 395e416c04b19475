"""Questions as people have them: a text, or a chat as a list of {"role": ..., "content": ...}."""

from __future__ import annotations

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, Literal, get_args, get_type_hints

from skylite.data.images import COLUMNS, count_marks, find_source, in_column
from skylite.data.raw_rows import Row
from skylite.errors import DataError
from skylite.types import IMAGE, Message
from skylite.untrusted_text import parse_json

ROLES: tuple[str, ...] = get_args(get_type_hints(Message)["role"])
SHAREGPT = {"human": "user", "gpt": "assistant"}
"""Names of roles in ShareGPT's chats, whose messages have 'from' and 'value'."""
_CHAT_AS_TEXT = re.compile(r"""\s*\[\s*\{\s*(['"])(role|content|from|value)\1\s*:""")
_HH_RLHF = re.compile(r"\n\n(Human|Assistant):")
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
    images: Sequence[Any] = ()
    """Where to read the images, in the order of IMAGE in the turns (data/images.py)."""


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
        return _with_images(row, Question("", [{"role": "user", "content": row.text(column)}], ""), [])
    turns = [_message(row, f"{column}[{i}]", turn, images=True) for i, turn in enumerate(value)]
    parts = [part for turn in value for part in _image_parts(turn.get("content"))]
    return _with_images(row, _question(row, f"the chat in {column!r}", turns), parts)


def _with_images(row: Row, question: Question, parts: Sequence[Any]) -> Question:
    """The question with the images of its content parts, or of the columns of the row.

    As in TRL, images of a column without a place stand before the text of the first user message.
    """
    own = [source for part in parts if (source := find_source(part)) is not None]
    found = own or [image for name in COLUMNS for image in in_column(row.values.get(name))]
    if not found and not parts:
        return question
    turns, marks = question.turns, count_marks(question.turns)
    if not marks and not parts:
        first = next(i for i, turn in enumerate(turns) if turn["role"] == "user")
        turn: Message = {"role": "user", "content": IMAGE * len(found) + turns[first]["content"]}
        turns, marks = [*turns[:first], turn, *turns[first + 1 :]], len(found)
    others = [question.system, question.reply]
    if (
        marks != len(found)
        or any(IMAGE in text for text in others)
        or any(IMAGE in turn["content"] for turn in turns if turn["role"] != "user")
    ):
        raise DataError(
            f"{row.where}: the user's messages have {marks} places of images ({IMAGE} or parts of the type "
            f"image), and the row has {len(found)} images.",
            "Give each place its image, in the columns images or image or in the parts themselves.",
        )
    return replace(question, turns=turns, images=found)


def _image_parts(content: Any) -> list[dict[str, Any]]:
    parts = content if isinstance(content, list) else []
    return [p for p in parts if isinstance(p, dict) and p.get("type") in ("image", "image_url")]


def _question(row: Row, what: str, turns: list[Message]) -> Question:
    system = ""
    if turns and turns[0]["role"] == "system":
        system = turns.pop(0)["content"]
    reply = ""
    if turns and turns[-1]["role"] == "assistant":
        reply = turns.pop()["content"]
    if not turns or turns[-1]["role"] != "user":
        raise DataError(
            f"{row.where}: {what} has no user message before the answer.",
            "A chat ends with a user message, or with the assistant's reference answer after one.",
        )
    if any(turn["role"] == "system" for turn in turns):
        raise DataError(
            f"{row.where}: {what} has a system message that is not the first.",
            "Put it first, or delete the row.",
        )
    return Question(system, turns, reply)


def read_pair(row: Row, column: str | None) -> tuple[Question, str]:
    """The prompt of a pair with the chosen reply, and the rejected reply. Raises DataError.

    Chosen and rejected are texts, or chats whose common beginning belongs to the prompt. `column`: of the
    prompt; None: only that beginning.
    """
    chosen, rejected = (_turns(row, name, "assistant") for name in ("chosen", "rejected"))
    begin = [
        one for one, _ in takewhile(lambda pair: pair[0] == pair[1], zip(chosen, rejected, strict=False))
    ]
    replies = chosen[len(begin) :], rejected[len(begin) :]
    if [[turn["role"] for turn in reply] for reply in replies] != [["assistant"]] * 2:
        raise DataError(
            f"{row.where}: 'chosen' and 'rejected' do not differ in exactly their last assistant message.",
            "Correct or delete the row.",
        )
    if column is None and not begin:
        raise DataError(
            f"{row.where}: 'chosen' and 'rejected' have no common beginning, which is the prompt.",
            "Name the column with the prompt: --question COLUMN.",
        )
    turns = begin if column is None else _joined(row, column, _turns(row, column, "user"), begin)
    where = "the prompt" if column is None else f"the prompt in {column!r}"
    asked = _question(row, where, [*turns, *replies[0]])
    return asked, replies[1][0]["content"]


def _joined(row: Row, column: str, prompt: list[Message], begin: list[Message]) -> list[Message]:
    """The turns of a prompt, which `begin` may repeat."""
    texts = [(turn["role"], turn["content"].strip()) for turn in begin]
    asked = [(turn["role"], turn["content"].strip()) for turn in prompt]
    if any(texts[i : i + len(asked)] == asked for i in range(len(texts))):
        return begin
    if any(role != "assistant" for role, _ in texts):
        raise DataError(
            f"{row.where}: 'chosen' and 'rejected' begin with another prompt than {column!r}.",
            "Correct or delete the row, or rename the column.",
        )
    return [*prompt, *begin]


def _turns(row: Row, column: str, role: Literal["user", "assistant"]) -> list[Message]:
    """The messages of a column; a text is one message of `role`, or a conversation as in hh-rlhf."""
    value = chat_value(row, column)
    if isinstance(value, list):
        return [_message(row, f"{column}[{i}]", turn) for i, turn in enumerate(value)]
    text = row.text(column)
    if not text.startswith("Human: ") or "\n\nAssistant:" not in text:
        return [{"role": role, "content": text}]
    _, *words = _HH_RLHF.split("\n\n" + text)
    turns = [
        {"role": "user" if name == "Human" else "assistant", "content": said.strip()}
        for name, said in zip(words[::2], words[1::2], strict=True)
    ]
    if role == "user" and not turns[-1]["content"]:
        turns.pop()  # "Assistant:" at the end of a prompt
    return [_message(row, f"{column}[{i}]", turn) for i, turn in enumerate(turns)]


def read_answer(row: Row, column: str) -> str:
    """The text of an answer; a chat of one assistant message, as TRL's completion, is its content."""
    value = chat_value(row, column)
    if isinstance(value, list) and len(value) == 1 and isinstance(value[0], dict):
        turn = _message(row, f"{column}[0]", value[0])
        if turn["role"] == "assistant":
            return turn["content"].strip()
    return row.text(column)


def _message(row: Row, where: str, turn: Any, *, images: bool = False) -> Message:
    """The message. With `images`, a content part that is one becomes IMAGE."""
    if isinstance(turn, dict) and turn.keys() >= {"from", "value"}:
        turn = {"role": SHAREGPT.get(str(turn["from"]), turn["from"]), "content": turn["value"]} | {
            name: value for name, value in turn.items() if name not in ("from", "value")
        }
    if not isinstance(turn, dict) or "role" not in turn or "content" not in turn:
        raise DataError(
            f"{row.where}: {where} is not a message with 'role' and 'content', or with 'from' and 'value'.",
            "Give a column of texts, or of chats as lists of such messages.",
        )
    role, content = turn["role"], _text_of_parts(turn["content"], images=images)
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
            "Give a text, or parts that are all {'type': 'text', 'text': ...}"
            + (" or {'type': 'image', ...}." if images else "; only prompts for RL have images."),
        )
    more = [name for name, value in turn.items() if name not in ("role", "content") and value]
    if more:
        raise DataError(
            f"{row.where}: {where} also has {more[0]!r}, which the prompt would lose.",
            "Delete that field or the row.",
        )
    return {"role": role, "content": content}


def _text_of_parts(content: Any, *, images: bool) -> Any:
    """The joined text of content parts if all are text, or images; other content unchanged."""
    if not isinstance(content, list) or not content:
        return content
    texts = [
        IMAGE if images and part in _image_parts(content) else part.get("text")
        for part in content
        if isinstance(part, dict)
        and (
            (part.get("type") == "text" and isinstance(part.get("text"), str))
            or (images and part.get("type") in ("image", "image_url"))
        )
    ]
    return "".join(text for text in texts if text) if len(texts) == len(content) else content
