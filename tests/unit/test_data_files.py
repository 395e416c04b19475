from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skylite.data.prompts import FOOTER_KEY, PromptFileInfo, read_prompts, write_rows
from skylite.data.raw_rows import hold_out, read_table
from skylite.errors import DataError
from skylite.types import Prompt
from tests.unit.data_cases import prompt

INFO = PromptFileInfo(
    dataset="t",
    source_kind="file",
    source="t.jsonl",
    source_sha256="0" * 64,
    count=2,
    seed=3,
    split="train",
    reward="gsm8k",
    system="Be brief.",
    few_shot=[{"role": "user", "content": "1 + 1?"}, {"role": "assistant", "content": "#### 2"}],
    limit=2,
)
PROMPTS = [prompt(id="t/0", difficulty=1, extra={"k": [1, None, "\u00e9"]}), prompt(id="t/1", difficulty=2)]


def written(path: Path, prompts: list[Prompt] = PROMPTS, info: PromptFileInfo = INFO) -> Path:
    write_rows(path, prompts, info)
    return path


def test_round_trip(tmp_path: Path) -> None:
    assert read_prompts(written(tmp_path / "train.parquet")) == (PROMPTS, INFO)
    assert [p.name for p in tmp_path.iterdir()] == ["train.parquet"]


def test_difficulties_are_filtered(tmp_path: Path) -> None:
    path = written(tmp_path / "train.parquet")
    assert read_prompts(path, difficulty=[2])[0] == PROMPTS[1:]
    with pytest.raises(DataError, match=r"no row of difficulty \[3\]; it has \[1, 2\]"):
        read_prompts(path, difficulty=[3])


def rewrite(path: Path, table: pa.Table) -> Path:
    pq.write_table(table, path)
    return path


def with_footer(table: pa.Table, **changes: object) -> pa.Table:
    footer = json.loads(table.schema.metadata[FOOTER_KEY])
    return table.replace_schema_metadata({FOOTER_KEY: json.dumps(footer | changes)})


def one_sentence(error: pytest.ExceptionInfo[DataError], path: Path) -> None:
    assert str(path) in error.value.what
    assert "\n" not in str(error.value)


DAMAGE = {
    "does not exist": lambda p: p.unlink(),
    "is not a parquet file": lambda p: p.write_bytes(p.read_bytes()[:-40]),
    "is not a parquet": lambda p: p.write_bytes(b""),
    "`skylite prepare` did not write it": lambda p: rewrite(p, pq.read_table(p).replace_schema_metadata({})),
    "has schema version 99; this skylite reads version 3": lambda p: rewrite(
        p, with_footer(pq.read_table(p), schema_version=99)
    ),
    "has a damaged footer": lambda p: rewrite(
        p, pq.read_table(p).replace_schema_metadata({FOOTER_KEY: b"{"})
    ),
    "damaged footer": lambda p: rewrite(p, with_footer(pq.read_table(p), surprise=1)),
    "has no column 'answer'": lambda p: rewrite(p, pq.read_table(p).drop_columns(["answer"])),
    "instead of int32": lambda p: rewrite(
        p, pq.read_table(p).set_column(4, "difficulty", pa.array(["a", "b"]))
    ),
    "has no rows": lambda p: rewrite(p, pq.read_table(p).slice(0, 0)),
    "has 1 rows, but its footer says 2": lambda p: rewrite(p, pq.read_table(p).slice(0, 1)),
    "row 2 has an empty answer": lambda p: rewrite(
        p, pq.read_table(p).set_column(2, "answer", pa.array(["7", None]))
    ),
    "row 1 has no JSON object in column 'extra'": lambda p: rewrite(
        p, pq.read_table(p).set_column(5, "extra", pa.array(["{", "{}"]))
    ),
}


@pytest.mark.parametrize("reason", DAMAGE)
def test_damaged_file_gives_one_sentence(tmp_path: Path, reason: str) -> None:
    path = written(tmp_path / "train.parquet")
    DAMAGE[reason](path)
    with pytest.raises(DataError, match=reason) as error:
        read_prompts(path)
    one_sentence(error, path)


def test_a_folder_is_not_a_prompt_file(tmp_path: Path) -> None:
    with pytest.raises(DataError):
        read_prompts(tmp_path)


def test_wrong_count_is_not_written(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="count is 3"):
        write_rows(tmp_path / "train.parquet", PROMPTS, replace(INFO, count=3))
    assert not list(tmp_path.iterdir())


GOOD = '{"q": "1 + 1?", "a": "2"}\n'
BROKEN = {
    "bad.jsonl line 17 is not JSON": ("bad.jsonl", GOOD * 16 + "{oops\n" + GOOD),
    "bad.jsonl line 2 holds list, not a JSON object": ("bad.jsonl", GOOD + "[1]\n"),
    "bad.jsonl has no rows": ("bad.jsonl", "\n\n"),
    "bad.csv line 3 does not have 2 fields": ("bad.csv", "q,a\n1,2\n1,2,3\n"),
    "bad.csv line 2 does not have 2 fields": ("bad.csv", "q,a\n1\n"),
    "bad.csv line 2 is not CSV": ("bad.csv", 'q,a\n1,"2\n'),
    "bad.csv has no rows": ("bad.csv", "q,a\n"),
    "bad.parquet is not a parquet file": ("bad.parquet", "PAR1 not really"),
    "is not UTF-8": ("bad.jsonl", "\udcff"),
    "is not a .jsonl": ("bad.txt", GOOD),
}


@pytest.mark.parametrize("reason", BROKEN)
def test_broken_source_names_file_line_and_reason(tmp_path: Path, reason: str) -> None:
    name, text = BROKEN[reason]
    (tmp_path / name).write_bytes(text.encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=reason) as error:
        read_table(tmp_path / name)
    one_sentence(error, tmp_path / name)


def test_three_formats_give_the_same_rows(tmp_path: Path) -> None:
    rows = [{"q": "1 + 1?", "a": "2"}, {"q": "one,\ntwo", "a": "3"}]
    (tmp_path / "x.jsonl").write_text("".join(json.dumps(r) + "\n\n" for r in rows), encoding="utf-8")
    (tmp_path / "x.csv").write_text('\ufeffq,a\n1 + 1?,2\n"one,\ntwo",3\n', encoding="utf-8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "x.parquet")
    for suffix in ("jsonl", "csv", "parquet"):
        assert [row.values for row in read_table(tmp_path / f"x.{suffix}").rows] == rows


def test_hold_out_is_a_partition_fixed_by_its_seed(tmp_path: Path) -> None:
    path = tmp_path / "x.jsonl"
    path.write_text("".join(f'{{"n": {i}}}\n' for i in range(100)), encoding="utf-8")
    table = read_table(path)
    rest, held = hold_out(table, 8, seed=1)
    assert len(held.rows) == 8
    assert sorted(r.index for r in [*rest.rows, *held.rows]) == list(range(100))
    assert hold_out(table, 8, seed=1) == (rest, held)
    assert hold_out(table, 8, seed=2) != (rest, held)
    assert len(hold_out(table, 512, seed=1)[1].rows) == 10
