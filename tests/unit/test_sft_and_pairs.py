"""`skylite prepare --sft` and `--pairs`: chats to learn, and pairs of replies, as people have them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skylite.data.prompts import read_chats, read_info, read_pairs, read_prompts
from skylite.errors import ConfigError, DataError
from tests.prepared import prepare

USER, ASSISTANT, SYSTEM = (
    lambda text, role=role: {"role": role, "content": text} for role in ("user", "assistant", "system")
)
FILLERS = [f"q{i}" for i in range(3)]
"""Questions of the other rows: train, validation and test need one each."""


def write(folder: Path, rows: list[dict[str, Any]]) -> str:
    path = folder / "my.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def chats(folder: Path, rows: list[dict[str, Any]], **flags: Any) -> dict[str, list[dict[str, str]]]:
    """Last part of the id -> messages, of all splits."""
    out = prepare(write(folder, rows), out=folder / "out", sft=True, **flags)
    files = [read_chats(out / f"{split}.parquet") for split in ("train", "validation", "test")]
    assert {info.kind for _, info in files} == {"sft"}
    return {chat.id.rpartition("/")[2]: chat.messages for part, _ in files for chat in part}  # type: ignore[misc]


def pairs(folder: Path, rows: list[dict[str, Any]], **flags: Any) -> dict[str, tuple[Any, str, str]]:
    out = prepare(write(folder, rows), out=folder / "out", pairs=True, **flags)
    files = [read_pairs(out / f"{split}.parquet") for split in ("train", "validation", "test")]
    assert {info.kind for _, info in files} == {"pairs"}
    return {p.id.rpartition("/")[2]: (p.messages, p.chosen, p.rejected) for part, _ in files for p in part}


CHAT = [SYSTEM("Be short."), USER("1 + 1?"), ASSISTANT("2"), USER("And 2 + 2?"), ASSISTANT("4")]
SHAREGPT = [{"from": "human", "value": "A?"}, {"from": "gpt", "value": "B"}]


@pytest.mark.parametrize(
    ("row", "messages"),
    [
        ({"messages": CHAT}, CHAT),
        ({"prompt": "unused", "messages": CHAT}, CHAT),
        ({"conversations": SHAREGPT}, [USER("A?"), ASSISTANT("B")]),
        ({"prompt": "A?", "completion": " B"}, [USER("A?"), ASSISTANT("B")]),
        ({"prompt": CHAT[:4], "completion": [ASSISTANT("4")]}, CHAT),
        ({"question": "A?", "answer": "B"}, [USER("A?"), ASSISTANT("B")]),
    ],
    ids=["messages", "messages-first", "sharegpt", "texts", "trl-chats", "question-answer"],
)
def test_forms_of_chats(tmp_path: Path, row: dict[str, Any], messages: list[dict[str, str]]) -> None:
    def filler(text: str) -> dict[str, Any]:
        if "messages" in row:
            return {"messages": [USER(text), ASSISTANT("x")]}
        if "conversations" in row:
            return {"conversations": [{"from": "human", "value": text}, {"from": "gpt", "value": "x"}]}
        return dict.fromkeys(row, text)

    assert chats(tmp_path, [row, *map(filler, FILLERS)])["0"] == messages


FILLER_CHATS = [{"messages": [USER(text), ASSISTANT("x")]} for text in FILLERS]


def test_a_system_text_replaces_that_of_the_chats(tmp_path: Path) -> None:
    found = chats(tmp_path, [{"messages": CHAT}, *FILLER_CHATS], system="Think.")
    assert found["0"] == [SYSTEM("Think."), *CHAT[1:]]
    assert found["1"] == [SYSTEM("Think."), USER("q0"), ASSISTANT("x")]


def test_columns_by_flag(tmp_path: Path) -> None:
    rows = [{"ask": f"{i}?", "say": str(i)} for i in range(4)]
    found = chats(tmp_path, rows, question="ask", answer="say")
    assert found["3"] == [USER("3?"), ASSISTANT("3")]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"messages": [USER("A?")]}, "line 2: the chat in 'messages' does not end with an assistant message"),
        ({"messages": []}, "line 2: the chat in 'messages' has no user message"),
        ({"messages": [ASSISTANT("B")]}, "line 2: the chat in 'messages' has no user message"),
        ({"messages": [USER("A?"), ASSISTANT(" ")]}, r"line 2: the content of messages\[1\] is empty"),
        (
            {"messages": [USER("A?"), {"role": "tool", "content": "1"}, ASSISTANT("B")]},
            r"line 2: messages\[1\] has the role 'tool'",
        ),
        ({"messages": [USER("A?"), SYSTEM("s"), USER("C?"), ASSISTANT("B")]}, "line 2: .* not the first"),
        ({"messages": None}, "line 2 has an empty 'messages'"),
        ({"text": "A"}, "line 2 has no column 'messages'"),
    ],
)
def test_a_bad_chat_is_named_or_left_out(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [FILLER_CHATS[0], row, *FILLER_CHATS[1:]]
    with pytest.raises(DataError, match=message):
        chats(tmp_path, rows)
    assert not (tmp_path / "out").exists()
    assert set(chats(tmp_path, rows, drop_failing=True)) == {"0", "2", "3"}


def test_equal_prompts_stay_in_one_split(tmp_path: Path) -> None:
    rows = [{"prompt": f"{i % 10}?", "completion": str(i)} for i in range(40)]
    chats(tmp_path, rows)
    parts = [
        read_chats(tmp_path / "out" / f"{split}.parquet")[0] for split in ("train", "validation", "test")
    ]
    asked = [{chat.messages[0]["content"] for chat in part} for part in parts]
    assert [len(part) for part in parts] == [32, 4, 4]
    assert not asked[0] & (asked[1] | asked[2])


def test_a_data_prep_file_gives_chats_of_its_references(tmp_path: Path) -> None:
    out = prepare("gsm8k", out=tmp_path / "out", synthetic=True, sft=True, limit=3)
    rows, info = read_chats(out / "train.parquet")
    assert (info.kind, info.reward, len(rows)) == ("sft", "gsm8k", 3)
    assert [turn["role"] for turn in rows[0].messages] == [
        "system",
        "user",
        "assistant",
    ]  # no worked examples
    assert "####" in rows[0].messages[-1]["content"]
    assert "<<" not in rows[0].messages[-1]["content"]


PROMPT = [USER("1 + 1?")]
PAIR = (PROMPT, "2", "3")
HH = "\n\nHuman: 1 + 1?\n\nAssistant: "


@pytest.mark.parametrize(
    ("row", "pair"),
    [
        ({"prompt": "1 + 1?", "chosen": "2", "rejected": "3"}, PAIR),
        ({"question": "1 + 1?", "chosen": "2", "rejected": "3"}, PAIR),
        ({"prompt": PROMPT, "chosen": [ASSISTANT("2")], "rejected": [ASSISTANT("3")]}, PAIR),
        ({"chosen": [*PROMPT, ASSISTANT("2")], "rejected": [*PROMPT, ASSISTANT("3")]}, PAIR),
        (
            {"prompt": "1 + 1?", "chosen": [*PROMPT, ASSISTANT("2")], "rejected": [*PROMPT, ASSISTANT("3")]},
            PAIR,
        ),
        (
            {"chosen": [*CHAT[:4], ASSISTANT("4")], "rejected": [*CHAT[:4], ASSISTANT("5")]},
            (CHAT[:4], "4", "5"),
        ),
        ({"chosen": HH + "2", "rejected": HH + "3"}, PAIR),
        ({"prompt": HH, "chosen": "2", "rejected": "3"}, PAIR),
    ],
    ids=["texts", "question", "chats", "implicit", "both", "implicit-turns", "hh-rlhf", "hh-prompt"],
)
def test_forms_of_pairs(tmp_path: Path, row: dict[str, Any], pair: tuple[Any, str, str]) -> None:
    def filler(text: str) -> dict[str, Any]:
        if "prompt" in row or "question" in row:
            return dict.fromkeys(row, text) | {"rejected": "y"}
        return {"chosen": [USER(text), ASSISTANT("x")], "rejected": [USER(text), ASSISTANT("y")]}

    assert pairs(tmp_path, [row, *map(filler, FILLERS)])["0"] == pair


FILLER_PAIRS = [{"prompt": text, "chosen": "x", "rejected": "y"} for text in FILLERS]


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "A?", "chosen": "B", "rejected": "B"}, "line 2: .* do not differ in exactly their last"),
        ({"prompt": "A?", "chosen": "B"}, "line 2 has no column 'rejected'"),
        ({"prompt": "A?", "chosen": "B", "rejected": ""}, "line 2 has an empty 'rejected'"),
        (
            {"prompt": "A?", "chosen": [USER("C"), ASSISTANT("B")], "rejected": [USER("C"), ASSISTANT("D")]},
            "line 2: 'chosen' and 'rejected' begin with another prompt than 'prompt'",
        ),
        (
            {
                "prompt": "A?",
                "chosen": [ASSISTANT("B"), USER("C?"), ASSISTANT("D")],
                "rejected": [ASSISTANT("E"), USER("C?"), ASSISTANT("F")],
            },
            "line 2: .* do not differ in exactly their last",
        ),
        ({"prompt": [ASSISTANT("A")], "chosen": "B", "rejected": "C"}, "prompt in 'prompt' has no user"),
    ],
)  # fmt: skip
def test_a_bad_pair_is_named_or_left_out(tmp_path: Path, row: dict[str, Any], message: str) -> None:
    rows = [FILLER_PAIRS[0], row, *FILLER_PAIRS[1:]]
    with pytest.raises(DataError, match=message):
        pairs(tmp_path, rows)
    assert not (tmp_path / "out").exists()
    assert set(pairs(tmp_path, rows, drop_failing=True)) == {"0", "2", "3"}


def test_texts_without_a_prompt_need_a_column(tmp_path: Path) -> None:
    rows = [{"chosen": f"good {i}", "rejected": f"bad {i}", "ask": str(i)} for i in range(4)]
    with pytest.raises(DataError, match="no common beginning, which is the prompt"):
        pairs(tmp_path, rows)
    assert pairs(tmp_path, rows, question="ask")["0"] == ([USER("0")], "good 0", "bad 0")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        ({"sft": True, "pairs": True}, "--sft and --pairs make different data"),
        ({"sft": True, "reward": "math"}, "--reward cannot be used with --sft"),
        ({"pairs": True, "few_shot": 2}, "--few-shot cannot be used with --pairs"),
        ({"sft": True, "no_answer": True}, "--no-answer cannot be used with --sft"),
        ({"pairs": True}, "no column chosen and rejected: it has 'messages'"),
        ({"sft": True, "question": "none"}, "has no column 'none'"),
    ],
)
def test_flags_that_do_not_fit(tmp_path: Path, flags: dict[str, Any], message: str) -> None:
    with pytest.raises((ConfigError, DataError), match=message):
        prepare(write(tmp_path, FILLER_CHATS), out=tmp_path / "out", **flags)
    assert not (tmp_path / "out").exists()


def test_generated_data_has_no_pairs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--pairs cannot be used with gsm8k"):
        prepare("gsm8k", out=tmp_path / "out", synthetic=True, pairs=True)


def test_each_reader_refuses_the_other_kinds(tmp_path: Path) -> None:
    made = {
        read_chats: prepare(write(tmp_path, FILLER_CHATS), out=tmp_path / "sft", sft=True),
        read_pairs: prepare(write(tmp_path, FILLER_PAIRS), out=tmp_path / "pairs", pairs=True),
        read_prompts: prepare("gsm8k", out=tmp_path / "prompts", synthetic=True, limit=2),
    }
    for reader in made:
        for maker, folder in made.items():
            if maker is not reader:
                with pytest.raises(DataError, match=r"train.parquet holds .*, not ") as error:
                    reader(folder / "train.parquet")
                assert "skylite prepare" in error.value.hint


def test_damaged_files_are_refused(tmp_path: Path) -> None:
    out = prepare(write(tmp_path, FILLER_CHATS), out=tmp_path / "out", sft=True)
    path = out / "train.parquet"
    table = pq.read_table(path)
    turns = table.schema.field("messages").type
    damaged: list[tuple[list[Any], str]] = [
        ([[USER("A?")]], "row 1 does not end with an assistant message"),
        ([[]], "row 1 has an empty messages"),
        ([None], "row 1 has an empty messages"),
        ([[{"role": "user", "content": None}]], "row 1 has an empty messages"),
    ]
    for messages, message in damaged:
        column = pa.array(messages, turns)
        pq.write_table(table.set_column(1, table.schema.field("messages"), column), path)
        with pytest.raises(DataError, match=message):
            read_chats(path)
    footer = json.loads(table.schema.metadata[b"skylite"]) | {"kind": ["sft"]}
    pq.write_table(table.replace_schema_metadata({b"skylite": json.dumps(footer)}), path)
    with pytest.raises(DataError, match="damaged footer"):
        read_info(path)
