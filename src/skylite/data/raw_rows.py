"""Raw rows from .jsonl, .json, .csv and .parquet files, each with its place for error messages."""

from __future__ import annotations

import csv
import io
import json
import math
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from hashlib import sha256
from pathlib import Path
from typing import Any

from skylite.data.prompts import SourceKind
from skylite.errors import DataError
from skylite.run.files import sha256_file
from skylite.untrusted_files import open_file, read_text
from skylite.untrusted_text import parse_json

READABLE = (".jsonl", ".json", ".csv", ".parquet")


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One raw row."""

    index: int
    """0-based position in its file; part of the prompt's id."""
    where: str
    """The row in its source, e.g. "train.jsonl line 17", for error messages."""
    values: dict[str, Any]

    def value(self, column: str) -> Any:
        """The value of a column; `a.b` may mean field b of column a. Raises DataError if it is missing."""
        if column in self.values:
            return self.values[column]
        found: Any = self.values
        for part in column.split("."):
            if not isinstance(found, dict) or part not in found:
                names = ", ".join(map(repr, self.values))
                raise DataError(f"{self.where} has no column {column!r}; it has {names}.")
            found = found[part]
        return found

    def text(self, column: str) -> str:
        """The stripped text of a column, or its number. Raises DataError when it is missing or empty."""
        value = self.value(column)
        if isinstance(value, bool) or not isinstance(value, str | int | float | None):
            raise DataError(
                f"{self.where}: {column!r} is {type(value).__name__}, not text.",
                "Give a column of texts. Your own reward gets any other column as it is, by its name: with "
                "--no-answer such a column needs no text.",
            )
        if isinstance(value, float) and is_whole_float(value):
            value = int(value)
        is_missing = value is None or (isinstance(value, float) and math.isnan(value))
        text = "" if is_missing else str(value).strip()
        if not text:
            raise DataError(f"{self.where} has an empty {column!r}.", "Fill it in or delete the row.")
        return text


def is_whole_float(value: Any) -> bool:
    """Whether a number is 51.0: pandas makes floats of whole numbers in a column with a missing value."""
    return isinstance(value, float) and value.is_integer() and abs(value) < 2**53


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """The raw rows of one split and their source."""

    rows: Sequence[Row]
    kind: SourceKind
    source: str
    sha256: str
    note: str = ""
    """A choice that `skylite prepare` prints and records; may be empty."""


def read_table(path: Path, kind: SourceKind = "file") -> Table:
    """All rows of a .jsonl, .json, .csv or .parquet file. Raises DataError with file, line and reason."""
    readers = {".jsonl": _jsonl_rows, ".json": _json_rows, ".csv": _csv_rows, ".parquet": _parquet_rows}
    reader = readers.get(path.suffix)
    if reader is None:
        raise DataError(f"{path} is not a {', '.join(READABLE[:-1])} or {READABLE[-1]} file.")
    if not path.is_file():
        raise DataError(
            f"{path} does not exist." if not path.exists() else f"{path} is not a file.", "Check the path."
        )
    try:
        rows = list(reader(path))
        digest = sha256_file(path)
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror or error}.") from None
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}).", "Save it as UTF-8.") from None
    if not rows:
        raise DataError(f"{path} has no rows.")
    return Table(rows=rows, kind=kind, source=str(path), sha256=digest)


def join_tables(tables: Sequence[Table], source: str) -> Table:
    """One table of all rows, counted again."""
    if len(tables) == 1:
        return replace(tables[0], source=source)
    rows = [row for table in tables for row in table.rows]
    digest = sha256("".join(table.sha256 for table in tables).encode()).hexdigest()
    numbered = [replace(row, index=i) for i, row in enumerate(rows)]
    return Table(rows=numbered, kind=tables[0].kind, source=source, sha256=digest)


def hold_out(table: Table, count: int, seed: int) -> tuple[Table, Table]:
    """Split off `count` rows, or a tenth of a small table, chosen by the seed.

    Returns (rest, held out), both in file order. Raises DataError for fewer than two rows.
    """
    count = min(count, max(1, len(table.rows) // 10))
    if len(table.rows) < 2:
        raise DataError(f"{table.source} has {len(table.rows)} row(s); holding some out needs two or more.")
    chosen = set(random.Random(seed).sample(range(len(table.rows)), count))
    rest = [row for i, row in enumerate(table.rows) if i not in chosen]
    return replace(table, rows=rest), replace(table, rows=[table.rows[i] for i in sorted(chosen)])


def generated_table(rows: Iterable[dict[str, Any]], kind: SourceKind, source: str) -> Table:
    """A table of generated rows. Its sha256 is taken from the rows as JSON lines."""
    rows = list(rows)
    digest = sha256(
        "".join(json.dumps(row, sort_keys=True, default=str) + "\n" for row in rows).encode()
    ).hexdigest()
    numbered = [Row(index=i, where=f"{source} row {i + 1}", values=row) for i, row in enumerate(rows)]
    return Table(rows=numbered, kind=kind, source=source, sha256=digest)


def _jsonl_rows(path: Path) -> Iterator[Row]:
    with io.TextIOWrapper(open_file(path), "utf-8-sig") as stream:  # Windows writes a byte order mark
        for number, line in enumerate(stream, start=1):
            if not line.strip():
                continue
            where = f"{path} line {number}"
            try:
                values = parse_json(line)
            except ValueError as error:
                raise DataError(f"{where} is not JSON: {error}.", "Correct or delete that line.") from None
            if not isinstance(values, dict):
                raise DataError(
                    f"{where} holds {type(values).__name__}, not a JSON object.",
                    "Correct or delete that line.",
                )
            yield Row(index=number - 1, where=where, values=values)


def _json_rows(path: Path) -> Iterator[Row]:
    """The rows of a list of objects; an object alone is one row."""
    try:
        values = parse_json(read_text(path, "utf-8-sig"))
    except UnicodeDecodeError:
        raise
    except ValueError as error:
        raise DataError(f"{path} is not JSON: {error}.", "For one object per line name it .jsonl.") from None
    for index, row in enumerate(values if isinstance(values, list) else [values]):
        where = f"{path} row {index + 1}"
        if not isinstance(row, dict):
            raise DataError(
                f"{where} holds {type(row).__name__}, not a JSON object.", "Give a list of objects."
            )
        yield Row(index=index, where=where, values=row)


def _csv_rows(path: Path) -> Iterator[Row]:
    # utf-8-sig: spreadsheets write a byte order mark, which would end up in the name of the first column.
    with io.TextIOWrapper(open_file(path), "utf-8-sig", newline="") as stream:
        reader = csv.DictReader(stream, strict=True)
        try:
            for index, values in enumerate(reader):
                where = f"{path} line {reader.line_num}"
                if None in values or None in values.values():
                    wanted = len(reader.fieldnames or [])
                    raise DataError(
                        f"{where} does not have {wanted} fields like the header line.", "Correct that line."
                    )
                yield Row(index=index, where=where, values=dict(values))
        except csv.Error as error:
            raise DataError(
                f"{path} line {reader.reader.line_num} is not CSV: {error}.", "Correct that line."
            ) from None


def _parquet_rows(path: Path) -> Iterator[Row]:
    import pyarrow as pa

    from skylite.run.parquet_file import read_parquet

    try:
        rows = read_parquet(path).to_pylist()
    except (pa.ArrowException, ValueError) as error:
        raise DataError(f"{path} is not a parquet file: {first_line(error)}.") from None
    for index, values in enumerate(rows):
        yield Row(index=index, where=f"{path} row {index + 1}", values=values)


def first_line(error: Exception) -> str:
    """The first line of an exception's text, or its class."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0].rstrip(".")
