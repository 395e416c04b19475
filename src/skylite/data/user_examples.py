"""Prompts from a user's rows: question, answer and other columns, system text and worked examples.

Question and answer are columns by flag or by name, or the chat and its last turn.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from skylite.config.rollout import RewardParameters
from skylite.data.chats import Question, chat_value, is_chat_as_text, read_answer, read_pair, read_question
from skylite.data.examples import Example, ExampleSet, sample_rows
from skylite.data.images import COLUMNS as IMAGE_COLUMNS
from skylite.data.images import read_image
from skylite.data.prompts import SPLITS, Kind, Split
from skylite.data.raw_rows import Row, Table, is_whole_float
from skylite.data.user_tables import OwnSource, filter_rows, read_own_tables
from skylite.errors import ConfigError, DataError
from skylite.notes import Note, warning
from skylite.rewards.built_in import DEFAULTS, default_system, reference_answer, reference_completion
from skylite.rewards.right_completion import PROBES, RightForm, fill, is_made_up
from skylite.types import Message, Prompt

HELD_OUT_SHARE = 0.05
"""Share of the distinct questions in validation, and in test."""
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
        return Columns(question, None), []
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
    return Columns(question, answer), notes


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
    return Columns(question, answer), [f"prompt: column {question!r}; reply: {text}"]


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
    return Columns(question, "chosen"), [f"prompt: {text}"]


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


@dataclass(frozen=True, slots=True, kw_only=True)
class OwnData:
    """A user's data, as the flags of `skylite prepare` describe it."""

    source: OwnSource
    columns: ColumnFlags
    reward: str
    """Empty for sft and pairs."""
    kind: Kind = "prompts"
    parameters: RewardParameters = DEFAULTS
    """Settings of a built-in reward."""
    find_form: Callable[[Sequence[Prompt]], tuple[RightForm, list[Note | str]]] | None = None
    """Of training prompts: how the user's own function wants a right answer, and notes. None: built in, or
    no answers."""
    empty_answers: Sequence[str] = ()
    """Names under which the reward asks for an answer that the data does not have: it gets an empty text."""
    system: str | None = None
    """System text of every prompt. None: the chat's own, else that of the reward."""
    few_shot: int = 0
    """A number of first training rows."""
    where: Sequence[str] = ()
    drop_failing: bool = False
    """Leave out rows without a question or an answer."""
    limit: int | None = None
    seed: int = 0


def user_file_examples(data: OwnData) -> ExampleSet:
    """Read the rows, split them by the seed and make prompts. Raises DataError and ConfigError."""
    read = read_own_tables(data.source)
    tables = {split: filter_rows(table, data.where) for split, table in read.splits.items()}
    notes: list[Note | str] = [*read.notes, *(f"--where {condition}" for condition in data.where)]
    choose = {"prompts": choose_columns, "sft": choose_sft_columns, "pairs": choose_pair_columns}[data.kind]
    columns, columns_note = choose(data.columns, tables["train"].rows[0])
    maker = PromptMaker(
        data=data,
        columns=columns,
        kept=kept_columns(tables, columns, notes) if data.kind == "prompts" else set(),
    )
    if data.drop_failing:
        tables = {split: maker.readable(table, notes) for split, table in tables.items()}
    examples, tables["train"] = few_shot_rows(data, tables["train"])
    if data.find_form is not None:
        few = replace(
            tables["train"], rows=tables["train"].rows[:: max(1, len(tables["train"].rows) // PROBES)]
        )
        form, form_notes = data.find_form([example.prompt for example in maker.examples("train", few)])
        maker, notes = replace(maker, form=form), [*notes, *form_notes]
    maker = replace(maker, few_shot=[turn for row in examples for turn in maker.worked_example(row)])
    full = hold_out_missing(tables, maker.key, data.seed, notes)
    full["train"] = sample_rows(full["train"], data.limit, data.seed)
    splits = {split: maker.examples(split, full[split]) for split in SPLITS}
    sizes = ", ".join(f"{len(rows)} {split}" for split, rows in splits.items())
    return ExampleSet(
        dataset=data.source.name,
        reward=data.reward,
        system=maker.default_system,
        few_shot=maker.few_shot,
        splits={str(split): rows for split, rows in splits.items()},
        tables={str(split): table for split, table in full.items()},
        notes=[*notes, *columns_note, *maker.notes(full), f"rows: {sizes}"],
        parameters=data.parameters,
        has_answers=data.columns.has_answers,
        form=maker.form,
        kind=data.kind,
    )


def few_shot_rows(data: OwnData, train: Table) -> tuple[Sequence[Row], Table]:
    """The rows of the worked examples, and the training rows without them. Raises ConfigError."""
    count = data.few_shot
    if count and count >= len(train.rows):
        raise ConfigError(f"--few-shot {count} takes all {len(train.rows)} training rows.", "Take fewer.")
    return train.rows[:count], replace(train, rows=train.rows[count:])


def kept_columns(tables: dict[Split, Table], columns: Columns, notes: list[Note | str]) -> set[str]:
    """The other columns, which the reward gets. Adds a note on those that JSON cannot hold."""
    used = {str(columns.question), *IMAGE_COLUMNS} | ({"answer"} if columns.answer == "answer" else set())
    refused: dict[str, str] = {}
    names: dict[str, None] = {}
    for row in (row for table in tables.values() for row in table.rows):
        for name, value in row.values.items():
            names[name] = None
            if name not in refused and name not in used and not _is_json(value):
                refused[name] = f"{name} ({type(value).__name__}, {row.where})"
    if refused:
        notes.append(f"columns without a JSON form are left out: {', '.join(refused.values())}")
    return set(names) - used - set(refused)


def _is_json(value: Any) -> bool:
    try:
        json.dumps(value)
    except (TypeError, ValueError, RecursionError):
        return False
    return True


def hold_out_missing(
    tables: dict[Split, Table], key: Callable[[Row], str], seed: int, notes: list[Note | str]
) -> dict[Split, Table]:
    """All three splits. Those without rows get about 5 % of the distinct training questions, at least one.

    Rows with the same question stay in one split.
    """
    train = tables["train"]
    keys = [key(row) for row in train.rows]
    distinct = sorted(set(keys))
    missing = [split for split in SPLITS if split not in tables]
    if len(distinct) <= len(missing):
        raise DataError(
            f"{train.source} has {len(distinct)} distinct question(s); "
            f"train{''.join(f', {split}' for split in missing)} need one each."
        )
    random.Random(f"split/{seed}").shuffle(distinct)
    held_out = max(1, round(len(distinct) * HELD_OUT_SHARE))
    split_of: dict[str, Split] = dict.fromkeys(distinct, "train")
    full = dict(tables)
    for number, split in enumerate(missing):
        split_of.update(dict.fromkeys(distinct[number * held_out : (number + 1) * held_out], split))
    changed: list[Split] = ["train", *missing]
    for split in changed:
        rows = [row for row, key in zip(train.rows, keys, strict=True) if split_of[key] == split]
        full[split] = replace(train, rows=rows)
    if missing:
        notes.append(f"{' and '.join(missing)}: held out of train at random (seed {seed}), by question")
    for split in set(tables) - {"train"}:
        shared = sum(split_of.get(key(row)) == "train" for row in tables[split].rows)
        if shared:
            notes.append(warning(f"{shared} questions of {split} are in train too"))
    return full


def _key_of(asked: Question) -> str:
    text = asked.turns[0]["content"] if len(asked.turns) == 1 else json.dumps(asked.turns)
    return text + "".join(map(_image_key, asked.images))


def _image_key(source: Any) -> str:
    data = source.get("bytes") if isinstance(source, dict) else source
    return sha256(data if isinstance(data, bytes) else str(source).encode()).hexdigest()


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptMaker:
    """Makes prompts of rows."""

    data: OwnData
    columns: Columns
    kept: set[str]
    """Columns that go to the reward."""
    few_shot: list[Message] = field(default_factory=list)
    form: RightForm | None = None
    """What the user's own function wants."""

    @property
    def default_system(self) -> str:
        """System text of prompts whose chat has none."""
        given = self.data.system
        return default_system(self.data.reward) if given is None else given

    @property
    def _folder(self) -> Path:
        """Where the paths of images begin."""
        target = Path(self.data.source.target)
        return target.parent if self.data.source.is_file else target

    def key(self, row: Row) -> str:
        """What makes two questions equal."""
        return _key_of(self._read(row)[0])

    def examples(self, split: Split, table: Table) -> list[Example]:
        """The examples of a split. Raises DataError with file, line and reason."""
        name = self.data.source.name
        return [self._example(row, f"{name}/{split}/{row.index}") for row in table.rows]

    def readable(self, table: Table, notes: list[Note | str]) -> Table:
        """The rows that have a question and an answer, with a note on the others."""
        rows, refused = [], []
        for row in table.rows:
            try:
                asked = self._read(row)[0]
                if self.data.columns.has_answers:
                    self._answer(row, asked)
                rows.append(row)
            except DataError as error:
                refused.append(error)
        if not rows:
            raise refused[0]
        if refused:
            notes.append(
                f"left out {len(refused)} of {len(table.rows)} rows that cannot be read; "
                f"the first: {refused[0].what}"
            )
        return replace(table, rows=rows)

    def worked_example(self, row: Row) -> list[Message]:
        """The turns of a row and a perfect completion. Raises DataError."""
        asked = self._read(row)[0]
        answer = self._answer(row, asked)
        reply = self._right(answer) or asked.reply or answer
        if self.form is not None and is_made_up(self.form.template):
            raise ConfigError(
                f"The reward {self.data.reward} wants thoughts before the answer, which the rows do not "
                f"have, so --few-shot {self.data.few_shot} has no worked examples to show.",
                "Remove --few-shot, or give a template that it likes as well: --answer-template TEXT.",
            )
        if asked.images:
            raise ConfigError(
                f"{row.where} has images, which worked examples cannot show (--few-shot "
                f"{self.data.few_shot}).",
                "Remove --few-shot.",
            )
        if not reply:
            raise ConfigError(
                f"{row.where} has no answer for a worked example (--few-shot {self.data.few_shot}).",
                "Give rows with answers, or remove --few-shot.",
            )
        return [*asked.turns, {"role": "assistant", "content": reply}]

    def notes(self, tables: dict[Split, Table]) -> list[Note | str]:
        """What the rows' own system messages and last turns became."""
        rows = [row for table in tables.values() for row in table.rows]
        asked = [self._read(row)[0] for row in rows]
        own = sum(bool(question.system) for question in asked)
        replies = sum(bool(question.reply) for question in asked) if self.columns.answer else 0
        if self.data.kind == "pairs":
            replies = 0
        notes: list[Note | str] = []
        if own and self.data.system is not None:
            notes.append(f"--system replaces the system message of {own} chats")
        elif own and self.default_system:
            notes.append(f"{own} chats keep their own system message")
        if (column := self.columns.question) and (
            texts := sum(is_chat_as_text(row.value(column)) for row in rows)
        ):
            notes.append(f"{texts} chats are stored as text; they are read as chats")
        notes += self._answer_notes(tables)
        if replies:
            notes.append(
                f"the last turn of {replies} chats is left out; {self.columns.answer!r} has the answers"
            )
        if empty := set(self.data.empty_answers) - self.kept:
            names = " and ".join(sorted(empty))
            notes.append(
                warning(
                    f"the reward {self.data.reward} asks for {names}; with --no-answer it gets an empty text"
                )
            )
        if self.few_shot:
            notes.append(f"{len(self.few_shot) // 2} worked examples (--few-shot {self.data.few_shot})")
        return notes

    def _answer_notes(self, tables: dict[Split, Table]) -> list[Note | str]:
        """What may surprise in the answers, and in columns that do not reach the prompt."""
        rows = [row for table in tables.values() for row in table.rows]
        notes: list[Note | str] = []
        column = self.columns.answer
        if column and (whole := sum(is_whole_float(row.value(column)) for row in rows)):
            notes.append(f"{whole} answers are whole numbers stored as 51.0; they are read as 51")
        if self.data.columns.has_answers and self.data.kind == "prompts":
            answers: dict[str, set[str]] = {}
            for row in rows:
                asked = self._read(row)[0]
                answers.setdefault(_key_of(asked), set()).add(self._answer(row, asked))
            if several := sum(len(found) > 1 for found in answers.values()):
                notes.append(warning(f"{several} questions occur with different answers"))
        if any(row.values.get("tools") for row in rows):
            use = "reaches the reward only" if self.data.kind == "prompts" else "is left out"
            notes.append(
                warning(
                    f"the column 'tools' {use}; no prompt shows it. For tools that the model can call use an "
                    "environment (docs/how-to/environments.md)"
                )
            )
        return notes

    def _read(self, row: Row) -> tuple[Question, str | None]:
        """What the row asks, and the rejected reply of a pair."""
        if self.data.kind == "pairs":
            return read_pair(row, self.columns.question)
        assert self.columns.question is not None, "only pairs may have no such column"
        return read_question(row, self.columns.question), None

    def _answer(self, row: Row, asked: Question) -> str:
        if self.data.kind == "pairs":
            return asked.reply
        if self.columns.answer is not None:
            return read_answer(row, self.columns.answer)
        if not asked.reply and self.data.columns.has_answers:
            raise DataError(
                f"{row.where}: the chat in {self.columns.question!r} does not end with an assistant message, "
                f"the {'reference answer' if self.data.kind == 'prompts' else 'reply to learn'}.",
                "Correct or delete the row, or name a column with --answer.",
            )
        return asked.reply

    def _right(self, answer: str) -> str | None:
        """A right completion; None if the reward looks at something else than the answer."""
        if self.data.kind != "prompts":
            return answer
        if self.form is not None:
            return fill(self.form.template, answer)
        return reference_completion(self.data.reward, answer, self.data.parameters)

    def _example(self, row: Row, prompt_id: str) -> Example:
        asked, rejected = self._read(row)
        if asked.images and self.data.kind != "prompts":
            raise DataError(
                f"{row.where} has images, and only prompts for RL may have any.", "Delete the row."
            )
        text = self._answer(row, asked) if self.data.columns.has_answers else ""
        system = (asked.system if self.data.system is None else "") or self.default_system
        messages: list[Message] = [{"role": "system", "content": system}] if system else []
        prompt = Prompt(
            id=prompt_id,
            messages=[*messages, *self.few_shot, *asked.turns],
            answer=reference_answer(self.data.reward, text, self.data.parameters) if self.data.reward else "",
            source=self.data.source.name,
            extra=dict.fromkeys(self.data.empty_answers, "")
            | {name: value for name, value in row.values.items() if name in self.kept},
            images=tuple(read_image(image, self._folder, row.where) for image in asked.images),
        )
        reference = None
        if self.data.columns.has_answers:
            reference = self._right(text)
        return Example(prompt=prompt, reference=reference, where=row.where, rejected=rejected)
