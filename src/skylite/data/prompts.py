"""train.parquet, validation.parquet and test.parquet of a prepared data set, of one of three kinds.

prompts    for RL: id, prompt (list of role and content), answer, source, difficulty, extra (JSON), images
sft        chats to learn: id, messages (list of role and content; the last message is the assistant's)
pairs      for DPO: id, messages (the prompt), chosen, rejected (texts of the assistant)

The footer records the kind and how the file was made (PromptFileInfo).
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from difflib import get_close_matches
from pathlib import Path
from typing import Any, ClassVar, Literal, TypeVar, get_args

import pyarrow as pa
import pyarrow.parquet as pq
from pydantic import ConfigDict, TypeAdapter, ValidationError

from skylite.errors import DataError, WriteFailed
from skylite.processes.file_tree import remove_tree
from skylite.run.files import atomic_file, fsync_path, swap_paths, temporary_sibling
from skylite.run.parquet_file import read_parquet, read_parquet_schema
from skylite.types import Message, Prompt
from skylite.untrusted_text import encodable, parse_json

SCHEMA_VERSION = 3
FOOTER_KEY = b"skylite"
_HINT = "Prepare it again with `skylite prepare`."

Kind = Literal["prompts", "sft", "pairs"]
Split = Literal["train", "validation", "test"]
SPLITS: tuple[Split, ...] = get_args(Split)
SourceKind = Literal["hub", "folder", "synthetic", "generated", "file"]


@dataclass(frozen=True, slots=True, kw_only=True)
class PromptFileInfo:
    """The footer of a prepared file: its source and how it was made."""

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(strict=True, extra="forbid")

    dataset: str
    source_kind: SourceKind
    source: str
    """A hub file, a path, or a generator and its settings."""
    source_sha256: str
    """Of the source file, or of the generated rows."""
    count: int
    seed: int
    split: Split
    reward: str
    """A built-in reward (rewards/built_in.py) or FILE.py:function."""
    system: str
    """System text of the prompts; may be empty."""
    few_shot: list[Message]
    """Worked examples in every prompt: alternating user and assistant turns."""
    limit: int | None = None
    """--limit of the training rows."""
    made_by: str = ""
    """Command that made the file."""
    notes: str = ""
    """Choices that `skylite prepare` logged, such as the source and why."""
    has_answers: bool = True
    """False: prepared with --no-answer. Every `answer` is empty then, and no reward was checked with one."""
    reward_settings: dict[str, Any] = field(default_factory=dict)
    """Settings of the section reward that `skylite prepare` was given, such as answer_pattern."""
    answer_template: str = ""
    """What the user's own reward takes for a right completion, with {answer}; empty for built-in rewards."""
    best_reward: float | None = 1.0
    """What a right completion scores; None: that differs between rows."""
    kind: Kind = "prompts"
    schema_version: int = SCHEMA_VERSION


_FOOTER = TypeAdapter(PromptFileInfo)


@dataclass(frozen=True, slots=True, kw_only=True)
class Chat:
    """A row to learn by SFT."""

    id: str
    messages: list[Message]
    """The last message is the assistant's."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Pair:
    """A row for DPO: a prompt, and two replies of the assistant to it."""

    id: str
    messages: list[Message]
    """The prompt. The last message is the user's."""
    chosen: str
    rejected: str


PreparedRow = Prompt | Chat | Pair
_TURNS = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))
PROMPT_SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("prompt", _TURNS),
        ("answer", pa.string()),
        ("source", pa.string()),
        ("difficulty", pa.int32()),
        ("extra", pa.string()),
        ("images", pa.list_(pa.binary())),
    ]
)
_CHAT = [("id", pa.string()), ("messages", _TURNS)]
SCHEMAS: dict[Kind, pa.Schema] = {
    "prompts": PROMPT_SCHEMA,
    "sft": pa.schema(_CHAT),
    "pairs": pa.schema([*_CHAT, ("chosen", pa.string()), ("rejected", pa.string())]),
}
_USES: dict[Kind, tuple[str, str]] = {
    "prompts": ("prompts for RL", "skylite prepare FILE --reward REWARD"),
    "sft": ("chats for algorithm.name=sft", "skylite prepare FILE --sft"),
    "pairs": ("pairs for algorithm.name=dpo", "skylite prepare FILE --pairs"),
}
"""What a file of a kind holds, and the command that makes it."""


def write_rows(path: Path, rows: Sequence[PreparedRow], info: PromptFileInfo) -> None:
    """Write one split atomically. The rows are of `info.kind`.

    Raises ValueError when `info.count` is not the number of rows, DataError for half a character.
    """
    if info.count != len(rows):
        raise ValueError(f"info.count is {info.count} but there are {len(rows)} rows")
    columns = [_prompt_columns(row) if isinstance(row, Prompt) else asdict(row) for row in rows]
    for row in columns:
        text = json.dumps({k: v for k, v in row.items() if k != "images"}, ensure_ascii=False)
        if encodable(text) is not text:
            raise DataError(
                f"The row {encodable(str(row['id']))} has half a character (a lone surrogate).",
                "No file can hold it: correct or delete the row.",
            )
    footer = {FOOTER_KEY: json.dumps(asdict(info), ensure_ascii=False).encode()}
    table = pa.Table.from_pylist(columns, schema=SCHEMAS[info.kind].with_metadata(footer))
    with atomic_file(path, table.nbytes) as temporary:
        pq.write_table(table, temporary, compression="zstd")


def replace_folder(
    folder: Path,
    rows: Mapping[str, Sequence[PreparedRow]],
    infos: Mapping[str, PromptFileInfo],
) -> None:
    """Replace the three files of `folder` atomically. Raises DataError, and leaves the folder as it was."""
    files = {f"{split}.parquet" for split in SPLITS}
    if folder.exists() and not folder.is_dir():
        raise DataError(f"{folder} is a file, not a folder.", "Choose another --out.")
    foreign = sorted(p.name for p in folder.iterdir() if p.name not in files) if folder.is_dir() else []
    if foreign:
        raise DataError(
            f"{folder} contains other files ({', '.join(foreign[:3])}), which prepare would delete.",
            "Choose another --out.",
        )
    folder = folder.absolute()
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        fresh = temporary_sibling(folder)
        fresh.mkdir()
        try:
            for split in SPLITS:
                write_rows(fresh / f"{split}.parquet", rows[split], infos[split])
            fsync_path(fresh)
            if folder.exists():
                swap_paths(fresh, folder)
            else:
                os.rename(fresh, folder)
            fsync_path(folder.parent)
        finally:
            remove_tree(fresh)
    except (OSError, WriteFailed) as error:
        reason = (error.strerror or str(error)) if isinstance(error, OSError) else error.what.rstrip(".")
        raise DataError(
            f"{folder} cannot be written: {reason}.", "Choose another --out or free space."
        ) from None


def _prompt_columns(prompt: Prompt) -> dict[str, Any]:
    return {
        "id": prompt.id,
        "prompt": prompt.messages,
        "answer": prompt.answer,
        "source": prompt.source,
        "difficulty": prompt.difficulty,
        "extra": json.dumps(prompt.extra, ensure_ascii=False),
        "images": list(prompt.images),
    }


def read_info(path: Path) -> PromptFileInfo:
    """The footer of a prepared file of any kind. Raises DataError."""
    return _read_info(path, _read(path, read_parquet_schema).metadata or {})


def read_prompts(path: Path, difficulty: Sequence[int] = ()) -> tuple[list[Prompt], PromptFileInfo]:
    """The prompts of a split, filtered by `difficulty` when given, and the footer. Raises DataError."""
    rows, info = _read_rows(path, "prompts")
    prompts = [_to_prompt(path, number, row) for number, row in enumerate(rows, start=1)]
    chosen = [p for p in prompts if p.difficulty in difficulty] if difficulty else prompts
    if not chosen:
        available = sorted({p.difficulty for p in prompts})
        raise DataError(
            f"{path} has no row of difficulty {list(difficulty)}; it has {available}.",
            "Set data.difficulty to some of these, or to [] for all.",
        )
    return chosen, info


def read_chats(path: Path) -> tuple[list[Chat], PromptFileInfo]:
    """The chats of a split that was prepared with --sft, and the footer. Raises DataError."""
    rows, info = _read_rows(path, "sft")
    for number, row in enumerate(rows, start=1):
        if row["messages"][-1]["role"] != "assistant":
            raise DataError(f"{path} row {number} does not end with an assistant message.", _HINT)
    return [Chat(**row) for row in rows], info


def read_pairs(path: Path) -> tuple[list[Pair], PromptFileInfo]:
    """The pairs of a split that was prepared with --pairs, and the footer. Raises DataError."""
    rows, info = _read_rows(path, "pairs")
    return [Pair(**row) for row in rows], info


def first_messages(info: PromptFileInfo) -> list[Message]:
    """The turns before the question of every training prompt."""
    system = [Message(role="system", content=info.system)] if info.system else []
    return [*system, *info.few_shot]


_T = TypeVar("_T")


def _read_rows(path: Path, kind: Kind) -> tuple[list[dict[str, Any]], PromptFileInfo]:
    """The checked rows of a file of this kind, without other columns. Raises DataError."""
    try:
        table = _read(path, read_parquet)
        info = _read_info(path, table.schema.metadata or {})
        if info.kind != kind:
            raise DataError(
                f"{path} holds {_USES[info.kind][0]}, not {_USES[kind][0]}.",
                f"Choose the algorithm that fits the data, or prepare it again: {_USES[kind][1]}.",
            )
        _check_columns(path, table.schema, SCHEMAS[kind])
        rows = table.select(SCHEMAS[kind].names).to_pylist()
    except UnicodeDecodeError as error:  # names of columns, or texts
        raise DataError(f"{path} is damaged: {_one_line(error)}", _HINT) from None
    if not rows:
        raise DataError(f"{path} has no rows.", _HINT)
    if len(rows) != info.count:
        raise DataError(f"{path} has {len(rows)} rows, but its footer says {info.count}.", _HINT)
    turns = "prompt" if kind == "prompts" else "messages"
    for number, row in enumerate(rows, start=1):
        empty = next((name for name, value in row.items() if value is None), None)
        if not row[turns] or any(turn is None or None in turn.values() for turn in row[turns]):
            empty = empty or turns
        if empty is not None:
            raise DataError(f"{path} row {number} has an empty {empty}.", _HINT)
    _check_ids(path, [row["id"] for row in rows])
    return rows, info


def _read(path: Path, read: Callable[[Path], _T]) -> _T:
    try:
        return read(path)
    except FileNotFoundError:
        raise DataError(f"{path} does not exist.", _prepared_beside(path.parent)) from None
    except NotADirectoryError:
        rows = path.parent
        raise DataError(
            f"{rows} is a file; training needs a folder that skylite prepared.",
            f"Run `skylite prepare {rows}`, and give the folder that it writes.",
        ) from None
    except UnicodeDecodeError:
        raise
    except (OSError, ValueError, pa.ArrowException) as error:
        raise DataError(f"{path} is not a parquet file: {_one_line(error)}", _HINT) from None


def _prepared_beside(folder: Path) -> str:
    """What to do about a folder without data: a similar name, or those that there are."""
    try:
        names = sorted(p.parent.name for p in folder.parent.glob("*/train.parquet"))
    except OSError:
        names = []
    near = get_close_matches(folder.name, names, n=1)
    if near:
        return f"Did you mean {folder.parent / near[0]}?"
    there = f" {folder.parent} has {', '.join(names[:8])}." if names else ""
    return f"Make it with `skylite prepare`.{there}"


def _read_info(path: Path, metadata: dict[bytes, bytes]) -> PromptFileInfo:
    if FOOTER_KEY not in metadata:
        raise DataError(
            f"{path} is a parquet file, but `skylite prepare` did not write it.",
            "Prepare it: skylite prepare FILE.parquet --question COLUMN --answer COLUMN --reward REWARD.",
        )
    try:
        footer = parse_json(metadata[FOOTER_KEY])
        version = footer["schema_version"]
    except (ValueError, TypeError, KeyError, IndexError):
        raise DataError(f"{path} has a damaged footer.", _HINT) from None
    if version != SCHEMA_VERSION:
        raise DataError(
            f"{path} has schema version {version!r}; this skylite reads version {SCHEMA_VERSION}.", _HINT
        )
    try:
        return _FOOTER.validate_json(metadata[FOOTER_KEY])
    except ValidationError:
        raise DataError(f"{path} has a damaged footer.", _HINT) from None


def _check_columns(path: Path, schema: pa.Schema, right: pa.Schema) -> None:
    for column in right:
        if column.name not in schema.names:
            raise DataError(f"{path} has no column {column.name!r}.", _HINT)
        found = schema.field(column.name).type
        if found != column.type:
            raise DataError(
                f"{path}: column {column.name!r} has type {found} instead of {column.type}.", _HINT
            )


def _to_prompt(path: Path, number: int, row: dict[str, Any]) -> Prompt:
    try:
        extra = parse_json(row["extra"])
        if not isinstance(extra, dict):
            raise ValueError(f"it holds {type(extra).__name__}")
    except ValueError as error:
        raise DataError(
            f"{path} row {number} has no JSON object in column 'extra': {error}.", _HINT
        ) from None
    if None in row["images"]:
        raise DataError(f"{path} row {number} has an empty image.", _HINT)
    return Prompt(
        id=row["id"],
        messages=row["prompt"],
        answer=row["answer"],
        source=row["source"],
        difficulty=row["difficulty"],
        extra=extra,
        images=tuple(row["images"]),
    )


def _check_ids(path: Path, ids: Sequence[str]) -> None:
    rows: dict[str, int] = {}
    for number, name in enumerate(ids, start=1):
        if (first := rows.setdefault(name, number)) != number:
            raise DataError(f"{path} rows {first} and {number} have the same id {name!r}.", _HINT)


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split()).rstrip(".") + "."
