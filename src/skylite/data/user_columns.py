"""Which columns of a user's data hold question and answer: by flag, by name, or the last turn of a chat."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from skylite.data.chats import chat_value, read_question
from skylite.data.raw_rows import Row
from skylite.errors import ConfigError

QUESTIONS = ("question", "problem", "prompt", "messages", "conversations")
ANSWERS = ("answer",)
"""Columns that are used without a flag."""
CHATS = ("messages", "conversations")
REPLIES = ("completion", "answer")
"""Columns for --sft without a flag: a chat that ends with the reply, or else a reply to one of QUESTIONS."""


@dataclass(frozen=True, slots=True)
class Columns:
    """The columns that make a prompt."""

    question: str | None
    """None: pairs, of which the chats have the prompt."""
    answer: str | None
    """None: the last turn of the chat is the answer, or there are no answers."""
    id: str | None


@dataclass(frozen=True, slots=True, kw_only=True)
class ColumnFlags:
    """What the flags say about the columns."""

    target: str
    """The data, for error messages."""
    question: str | None
    """Column of texts or chats. None: one of QUESTIONS."""
    answer: str | None
    """Column of reference answers. None: one of ANSWERS, else the last turn of the chat."""
    has_answers: bool = True
    """False: the rows have no reference answers."""
    id: str | None = None
    """Column of ids. None: the row's number."""


def choose_columns(flags: ColumnFlags, first: Row) -> tuple[Columns, list[str]]:
    """The columns, by flag or by name, and notes on those found by name. Raises ConfigError."""
    names = ", ".join(map(repr, first.values))
    found = _named(QUESTIONS, first)
    missing = missing_flags(flags, first)
    if "--question" in missing:
        which = f"its columns {' and '.join(map(repr, found))} could be meant" if found else f"it has {names}"
        raise ConfigError(f"{flags.target} needs --question: {which}.", "Name the column.")
    question = found[0] if flags.question is None else flags.question
    if not flags.has_answers:
        return Columns(question, None, flags.id), []
    if missing:
        raise ConfigError(
            f"{flags.target} needs --answer: it has {names}.",
            f"Name the column with the reference answers{_example(first)}. For data without them give "
            "--no-answer.",
        )
    answer = next(iter(_named(ANSWERS, first)), None) if flags.answer is None else flags.answer
    notes = []
    if flags.question is None or flags.answer is None:
        text = f"column {answer!r}" if answer else "the last turn of the chat"
        notes.append(f"question: column {question!r}; answer: {text}")
    return Columns(question, answer, flags.id), notes


def choose_sft_columns(flags: ColumnFlags, first: Row) -> tuple[Columns, list[str]]:
    """The columns for --sft: by flag, a chat that ends with a reply, or question and reply."""
    question = flags.question or next(iter(_named((*CHATS, *QUESTIONS), first)), None)
    answer = flags.answer
    if question is not None and answer is None and not read_question(first, question).reply:
        answer = next(iter(_named(REPLIES, first)), None)
        if answer is None:
            question = question if flags.question else None
    names = ", ".join(map(repr, first.values))
    if question is None:
        raise ConfigError(
            f"{flags.target} needs chats that end with an assistant message in a column "
            f"{' or '.join(CHATS)}, or prompt and completion: it has {names}.",
            "Name the columns: --question COLUMN, and --answer COLUMN for the replies.",
        )
    text = f"column {answer!r}" if answer else "the last turn of the chat"
    return Columns(question, answer, flags.id), [f"prompt: column {question!r}; reply: {text}"]


def choose_pair_columns(flags: ColumnFlags, first: Row) -> tuple[Columns, list[str]]:
    """The columns for --pairs, which has the replies in chosen and rejected. Raises ConfigError."""
    if missing := [name for name in ("chosen", "rejected") if name not in first.values]:
        names = ", ".join(map(repr, first.values))
        raise ConfigError(
            f"{flags.target} has no column {' and '.join(missing)}: it has {names}.",
            "Rename the columns with the better and the worse reply to chosen and rejected.",
        )
    question = flags.question or next(iter(_named(("prompt", "question", "problem"), first)), None)
    text = f"column {question!r}" if question else "the common beginning of chosen and rejected"
    return Columns(question, "chosen", flags.id), [f"prompt: {text}"]


def missing_flags(flags: ColumnFlags, first: Row) -> list[str]:
    """Those of --question and --answer that were not given and whose column `first` does not show."""
    found = _named(QUESTIONS, first)
    question = found[0] if flags.question is None and len(found) == 1 else flags.question
    has_answer = not flags.has_answers or flags.answer is not None or bool(_named(ANSWERS, first))
    if not has_answer and question is not None and isinstance(chat_value(first, question), list):
        has_answer = bool(read_question(first, question).reply)
    return [*(["--question"] if question is None else []), *([] if has_answer else ["--answer"])]


def _example(first: Row) -> str:
    """A column, or a field of one, whose name says that it has answers, as verl's do."""
    fields = [(n, n) for n in first.values]
    fields += [(f"{n}.{inner}", inner) for n, v in first.values.items() if isinstance(v, dict) for inner in v]
    likely = ("ground_truth", "solution", "final_answer", "completion")
    found = next((path for name in likely for path, last in fields if last == name), None)
    return f", e.g. --answer {found}" if found else ""


def _named(names: Sequence[str], first: Row) -> list[str]:
    return [name for name in names if name in first.values]
