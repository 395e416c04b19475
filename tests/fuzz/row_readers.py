"""Readers of a stranger's rows: `skylite prepare` of their jsonl, json, csv and parquet files."""

from __future__ import annotations

import csv
import io
import json
import random
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from tests.fuzz.damage import BYTE_KINDS, TREE_KINDS, damaged_bytes, damaged_document
from tests.fuzz.reader import Reader, prepare_nothing
from tests.prepared import prepare

CHAT = [{"role": "system", "content": "Add."}, {"role": "user", "content": "1 + 1?"}]
ROWS: list[dict[str, Any]] = [
    {"question": f"{n} + 1?", "answer": f"#### {n + 1}", "level": n, "notes": {"a": [n, None]}}
    for n in range(6)
]
ROWS[5]["question"] = CHAT
TEXTS = [row | {"question": f"{row['level']} + 1?"} for row in ROWS]
"""Rows without a chat: a column of csv and parquet has one type."""


def _jsonl(chosen: random.Random, kind: str) -> bytes:
    texts = [json.dumps(row).encode() for row in ROWS]
    at = chosen.randrange(len(texts))
    texts[at] = damaged_document(chosen, ROWS[at], kind)
    return b"\n".join(texts) + b"\n"


def _json(chosen: random.Random, kind: str) -> bytes:
    return damaged_document(chosen, ROWS, kind)


def _csv(chosen: random.Random, kind: str) -> bytes:
    """One field is odd, or the bytes."""
    names = list(TEXTS[0])
    table = [names, *([str(row[name]) for name in names] for row in TEXTS)]
    if kind in TREE_KINDS:
        line = chosen.choice(table)
        odd = [
            "",
            '"',
            "\r",
            "\0",
            "=1+1",
            "[" * 100_000,
            "9" * 6000,
            "nan",
            "\ufeff",
            "a,b",
            "\n\n",
            "\ud800",
        ]
        if kind == "removed":
            del line[chosen.randrange(len(line))]
        else:
            line[chosen.randrange(len(line))] = chosen.choice(odd)
    stream = io.StringIO(newline="")
    csv.writer(stream, lineterminator="\n").writerows(table)
    raw = stream.getvalue().encode("utf-8", errors="surrogatepass")
    return damaged_bytes(chosen, raw, kind) if kind in BYTE_KINDS else raw


def _parquet(chosen: random.Random, kind: str) -> bytes:
    """One column has another type, or the bytes are damaged."""
    table = pa.Table.from_pylist(TEXTS)
    if kind in TREE_KINDS:
        column = chosen.choice(table.column_names)
        odd = [None, float("nan"), "", [[1]], {"a": {"b": 1}}, b"\xff", True, 2**63 - 1, "[" * 100_000, CHAT]
        values = pa.array([chosen.choice(odd)] * table.num_rows)
        table = (
            table.drop_columns([column])
            if kind == "removed"
            else table.set_column(table.schema.get_field_index(column), column, values)
        )
    stream = io.BytesIO()
    pq.write_table(table, stream)
    raw = stream.getvalue()
    return damaged_bytes(chosen, raw, kind) if kind in BYTE_KINDS else raw


def _rows(name: str, make: Callable[[random.Random, str], bytes]) -> Reader:
    def damage(folder: Path, chosen: random.Random, kind: str) -> None:
        (folder / name).write_bytes(make(chosen, kind))

    def read(folder: Path) -> None:
        with tempfile.TemporaryDirectory() as out:
            prepare(str(folder / name), out=Path(out) / "data", reward="gsm8k")

    return Reader(prepare_nothing, damage, read, share=0.5)


ROW_READERS = {
    "rows.jsonl": _rows("rows.jsonl", _jsonl),
    "rows.json": _rows("rows.json", _json),
    "rows.csv": _rows("rows.csv", _csv),
    "rows.parquet": _rows("rows.parquet", _parquet),
}
