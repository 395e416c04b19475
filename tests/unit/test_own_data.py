"""`skylite prepare` on data as people have it: files, folders, chats, columns, worked examples, filters."""

from __future__ import annotations

import datetime
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.errors import ConfigError, DataError, SkyliteError
from skylite.types import Prompt
from tests.prepared import prepare

ROWS: list[dict[str, Any]] = [
    {"q": f"What is {i} + 1?", "a": str(i + 1), "level": i % 3, "tags": ["sum", str(i)], "uid": f"r{i}"}
    for i in range(30)
]
COLUMNS: dict[str, Any] = {"question": "q", "answer": "a", "reward": "math"}


@pytest.fixture(autouse=True)
def in_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, indent=1), encoding="utf-8")
    elif path.suffix == ".csv":
        lines = [",".join(rows[0]), *(",".join(map(str, row.values())) for row in rows)]
        path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    else:
        path.write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf-8")
    return str(path)


def chat(*contents: str, system: str = "") -> list[Any]:
    turns = [{"role": ("user", "assistant")[i % 2], "content": text} for i, text in enumerate(contents)]
    return [{"role": "system", "content": system}, *turns] if system else turns


def read(folder: Path) -> dict[str, tuple[list[Prompt], PromptFileInfo]]:
    return {split: read_prompts(folder / f"{split}.parquet") for split in ("train", "validation", "test")}


def prompts(folder: Path) -> dict[str, Prompt]:
    """All prompts by their question."""
    return {p.messages[-1]["content"]: p for found, _ in read(folder).values() for p in found}


@pytest.mark.parametrize("suffix", ["jsonl", "json", "csv", "parquet"])
def test_each_format_gives_the_same_prompts(suffix: str, tmp_path: Path) -> None:
    flat = [{k: v for k, v in row.items() if k != "tags"} for row in ROWS]
    found = prompts(prepare(write(tmp_path / f"sums.{suffix}", flat), **COLUMNS))
    assert {q: p.answer for q, p in found.items()} == {row["q"]: row["a"] for row in ROWS}
    level = "0" if suffix == "csv" else 0
    assert found["What is 3 + 1?"].extra == {"a": "4", "level": level, "uid": "r3"}


def test_other_columns_reach_the_reward_function(tmp_path: Path) -> None:
    reward = tmp_path / "mine.py"
    reward.write_text(
        "def score(completion, *, answer, tags):\n"
        "    return float(completion == answer and tags[0] == 'sum')\n"
    )
    path = write(tmp_path / "sums.jsonl", ROWS)
    found = prompts(prepare(path, question="q", answer="a", reward=f"{reward}:score"))
    assert found["What is 7 + 1?"].extra["tags"] == ["sum", "7"]


def test_columns_that_json_cannot_hold_are_left_out_with_a_note(tmp_path: Path) -> None:
    rows = [row | {"day": datetime.date(2026, 1, 1), "raw": b"x"} for row in ROWS]
    splits = read(prepare(write(tmp_path / "sums.parquet", rows), **COLUMNS))
    assert set(splits["train"][0][0].extra) == {"a", "level", "tags", "uid"}
    notes = splits["train"][1].notes
    assert "day (date, " in notes
    assert "raw (bytes, " in notes


def test_trl_conversational_prompts(tmp_path: Path) -> None:
    rows = [{"prompt": chat(f"{i} + 1?", system="Be brief."), "solution": str(i + 1)} for i in range(30)]
    folder = prepare(write(tmp_path / "trl.parquet", rows), answer="solution", reward="math")
    found = prompts(folder)["5 + 1?"]
    assert found.messages == chat("5 + 1?", system="Be brief.")
    assert (found.answer, found.extra) == ("6", {"solution": "6"})
    notes = read(folder)["train"][1].notes
    assert "question: column 'prompt'; answer: column 'solution'" in notes
    assert "30 chats keep their own system message" in notes


def test_the_last_assistant_turn_is_the_answer(tmp_path: Path) -> None:
    rows: list[dict[str, Any]] = [
        {"messages": chat(f"x{i}?", "Hm.", f"{i} + 1?", str(i + 1))} for i in range(30)
    ]
    path = write(tmp_path / "sft.jsonl", rows)
    found = prompts(prepare(path, reward="math"))["5 + 1?"]
    assert [m["content"] for m in found.messages[1:]] == ["x5?", "Hm.", "5 + 1?"]
    assert found.answer == "6"
    rows = [row | {"a": str(i + 1)} for i, row in enumerate(rows)]
    folder = prepare(write(tmp_path / "both.jsonl", rows), answer="a", reward="math")
    assert "the last turn of 30 chats is left out; 'a' has the answers" in read(folder)["train"][1].notes


def test_the_system_prompt_of_the_flag_wins(tmp_path: Path) -> None:
    path = write(
        tmp_path / "c.jsonl", [{"prompt": chat(f"{i}?", system="A."), "answer": "1"} for i in range(9)]
    )
    folder = prepare(path, reward="math", system="B.")
    assert prompts(folder)["3?"].messages[0] == {"role": "system", "content": "B."}
    assert "--system replaces the system message of 9 chats" in read(folder)["test"][1].notes
    assert prompts(prepare(path, reward="math", system=""))["3?"].messages == chat("3?")
    text = write(tmp_path / "t.jsonl", ROWS)
    assert prompts(prepare(text, **COLUMNS, system=""))["What is 3 + 1?"].messages == chat("What is 3 + 1?")


def test_first_rows_become_worked_examples_and_leave_training(tmp_path: Path) -> None:
    found = prompts(prepare(write(tmp_path / "s.jsonl", ROWS), **COLUMNS, few_shot=2, system=""))
    worked = chat("What is 0 + 1?", "\\boxed{1}", "What is 1 + 1?", "\\boxed{2}", "What is 9 + 1?")
    assert found["What is 9 + 1?"].messages == worked
    assert len(found) == 28
    assert "What is 0 + 1?" not in found


def test_rows_are_filtered_and_keep_their_numbers(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", ROWS)
    found = prompts(prepare(path, **COLUMNS, where=["level=0,1", "uid=r1,r3,r5,r6,r7"]))
    assert {p.id.rpartition("/")[2] for p in found.values()} == {"1", "3", "6", "7"}  # row 5 has level 2


def test_a_folder_with_configs_splits_and_shards(tmp_path: Path) -> None:
    write(tmp_path / "set/easy/train-00000-of-00002.parquet", ROWS[:10])
    write(tmp_path / "set/easy/train-00001-of-00002.parquet", ROWS[10:20])
    write(tmp_path / "set/easy/test-00000-of-00001.parquet", ROWS[20:])
    write(tmp_path / "set/hard/train.jsonl", ROWS[:3])
    (tmp_path / "set/dataset_infos.json").write_text("{}")
    splits = read(prepare("./set", **COLUMNS, config="easy", test_split="test"))
    assert [len(splits[s][0]) for s in ("train", "validation", "test")] == [19, 1, 10]
    ids = [p.id for s in splits.values() for p in s[0]]
    assert len(set(ids)) == 30
    assert "splits of config easy: train, test of test, train" in splits["test"][1].notes


def test_rows_that_do_not_score_can_be_left_out(tmp_path: Path) -> None:
    rows = [*ROWS, {"q": "Who?", "a": "nobody knows"}]
    path = write(tmp_path / "s.jsonl", rows)
    with pytest.raises(DataError, match=r"line 31: The answer 'nobody knows'.*"):
        prepare(path, **COLUMNS)
    splits = read(prepare(path, **COLUMNS, drop_failing=True))
    assert sum(len(found) for found, _ in splits.values()) == 30
    assert "left out 1 of 31 rows" in splits["train"][1].notes


def test_questions_of_test_that_train_has_too_are_a_warning(tmp_path: Path) -> None:
    write(tmp_path / "set/train.jsonl", ROWS)
    write(tmp_path / "set/test.jsonl", ROWS[:4])
    notes = read(prepare("./set", **COLUMNS, test_split="test"))["train"][1].notes
    assert "warning: 4 questions of test are in train too" in notes


BAD_CHATS: dict[str, list[Any]] = {
    "prompt\\[0\\] has the role 'tool'": [{"role": "tool", "content": "x"}],
    "prompt\\[0\\] is not a message": ["hello"],
    "content of prompt\\[0\\] is list, not text": [{"role": "user", "content": [{"type": "audio"}]}],
    "content of prompt\\[0\\] is empty": [{"role": "user", "content": " "}],
    "has no user message before the answer": [{"role": "assistant", "content": "x"}],
    "has tool calls": [{"role": "user", "content": "x", "tool_calls": [1]}],
    "system message that is not the first": [*chat("a", "b"), {"role": "system", "content": "s"}, *chat("c")],
}


@pytest.mark.parametrize("reason", BAD_CHATS)
def test_a_bad_chat_is_named(reason: str, tmp_path: Path) -> None:
    rows = [{"prompt": chat("1?"), "answer": "1"}, {"prompt": BAD_CHATS[reason], "answer": "1"}]
    with pytest.raises(DataError, match=f"line 2.*{reason}") as error:
        prepare(write(tmp_path / "bad.jsonl", rows), reward="math")
    assert "\n" not in str(error.value)
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("row", "needed"),
    [
        ({"question": "1?", "answer": "1"}, "--reward"),
        ({"messages": chat("1?", "1")}, "--reward"),
        ({"messages": chat("1?")}, "--answer and --reward"),
        ({"problem": "1?", "solution": "1"}, "--answer and --reward"),
        ({"question": "1?", "problem": "2?", "answer": "1"}, "--question and --reward"),
    ],
)
def test_without_a_reward_only_missing_flags_are_named(row: Any, needed: str, tmp_path: Path) -> None:
    path = write(tmp_path / "train.jsonl", [row] * 3)
    for target in (path, str(tmp_path)):
        with pytest.raises(ConfigError) as error:
            prepare(target)
        assert error.value.what == f"{target} needs {needed}."


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"question": "x"}, "has no column 'x'; it has 'q', 'a', 'level', 'tags', 'uid'"),
        ({"question": "tags"}, r"tags\[0\] is not a message"),
        ({"answer": "tags"}, "'tags' is list, not text"),
        ({"reward": None}, r"needs --reward\. Example: --reward gsm8k\.$"),
        ({"question": None}, "needs --question: it has 'q', 'a', 'level', 'tags', 'uid'"),
        ({"answer": None}, "needs --answer: it has 'q', 'a', 'level', 'tags', 'uid'"),
        ({"where": ["level"]}, "--where level is not COLUMN=VALUE"),
        ({"where": ["level=9"]}, "fits no row of .*; level has the values 0, 1, 2"),
        ({"where": ["size=1"]}, "has no column 'size'; it has"),
        ({"few_shot": 30}, "takes all 30 training rows"),
        ({"split": "train"}, "--split cannot be used with the single file"),
        ({"config": "main", "test_split": "x"}, "--config and --test-split cannot be used with"),
    ],
)
def test_bad_flags_are_one_sentence(flags: dict[str, Any], reason: str, tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", ROWS)
    with pytest.raises(SkyliteError, match=reason) as error:
        prepare(path, **(COLUMNS | flags))
    assert error.value.exit_code == 2
    assert "\n" not in str(error.value)
    assert [p.name for p in tmp_path.iterdir()] == ["s.jsonl"]


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({}, r"has several configs: a, b\. Choose one with --config"),
        ({"config": "c"}, "has no config 'c'; it has a, b"),
        ({"config": "a", "split": "dev"}, "has no split 'dev'; it has test, train"),
        ({"config": "b"}, "has 1 of the 3 files of the split 'train'"),
        ({"config": "a", "test_split": "train"}, "was chosen for two splits"),
    ],
)
def test_bad_splits_are_one_sentence(flags: dict[str, Any], reason: str, tmp_path: Path) -> None:
    write(tmp_path / "set/a/train.jsonl", ROWS)
    write(tmp_path / "set/a/test.jsonl", ROWS)
    write(tmp_path / "set/b/train-00001-of-00003.parquet", ROWS)
    with pytest.raises(SkyliteError, match=reason):
        prepare("./set", **COLUMNS, **flags)
    assert not Path("data").exists()


@pytest.mark.parametrize(
    ("name", "text", "reason"),
    [
        ("s.json", "[]", "has no rows"),
        ("s.json", "[1]", "row 1 holds int, not a JSON object"),
        ("s.json", '{"q": 1}\n{"q": 2}', "is not JSON: .* For one object per line name it .jsonl"),
        ("s.jsonl", "", "has no rows"),
    ],
)
def test_bad_files_are_named(name: str, text: str, reason: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text(text)
    with pytest.raises(DataError, match=f"{name}.*{reason}"):
        prepare(str(tmp_path / name), **COLUMNS)


def test_two_columns_that_could_be_the_question_need_a_flag(tmp_path: Path) -> None:
    path = write(tmp_path / "s.jsonl", [{"question": "1?", "prompt": "2?", "answer": "1"}] * 4)
    with pytest.raises(ConfigError, match="its columns 'question' and 'prompt' could be meant"):
        prepare(path, reward="math")


def test_a_prepared_file_with_duplicate_ids_is_refused(tmp_path: Path) -> None:
    folder = prepare(write(tmp_path / "s.jsonl", ROWS), **COLUMNS)
    table = pq.read_table(folder / "train.parquet")
    twice = pa.concat_tables([table.slice(0, 1), table.slice(0, table.num_rows - 1)])
    pq.write_table(twice.replace_schema_metadata(table.schema.metadata), folder / "train.parquet")
    with pytest.raises(DataError, match="rows 1 and 2 have the same id 's/train/"):
        read_prompts(folder / "train.parquet")
