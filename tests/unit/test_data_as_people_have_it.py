"""Data and rewards after public reports: what other tools write, and what people write for them."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.errors import ConfigError, DataError
from skylite.types import Prompt
from tests.prepared import prepare

SUMS = [(i, i * 3 + 1) for i in range(40)]
TOOLS = [{"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}]


@pytest.fixture(autouse=True)
def in_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def lines(rows: list[dict[str, Any]], name: str = "rows.jsonl", encoding: str = "utf-8") -> str:
    Path(name).write_text("".join(json.dumps(row) + "\n" for row in rows), encoding=encoding)
    return name


def prepared(
    source: str, reward: str = "exact_match", **flags: Any
) -> tuple[dict[str, Prompt], PromptFileInfo]:
    """All prompts by their last message, and the footer."""
    folder = prepare(source, reward=reward, **flags)
    found: dict[str, Prompt] = {}
    for split in ("train", "validation", "test"):
        prompts, info = read_prompts(folder / f"{split}.parquet")
        found |= {prompt.messages[-1]["content"]: prompt for prompt in prompts}
    return found, info


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


VERL = [
    {
        "data_source": "own/sums",
        "prompt": [user(f"{a}+{b}?")],
        "ability": "math",
        "reward_model": {"style": "rule", "ground_truth": str(a + b)},
        "extra_info": {"split": "train", "index": a, "parts": [a, b]},
    }
    for a, b in SUMS
]
LARGE = pa.schema(
    [
        ("data_source", pa.dictionary(pa.int32(), pa.string())),
        ("prompt", pa.large_list(pa.struct([("role", pa.large_string()), ("content", pa.large_string())]))),
        ("ability", pa.large_string()),
        ("reward_model", pa.struct([("style", pa.large_string()), ("ground_truth", pa.large_string())])),
        (
            "extra_info",
            pa.struct([("split", pa.string()), ("index", pa.int64()), ("parts", pa.list_(pa.int64(), 2))]),
        ),
    ]
)
VERL_REWARD = """
def compute_score(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    return {"score": 1.0}

def compute_number(data_source, solution_str, ground_truth, extra_info=None, **kwargs):
    assert data_source == "own/sums" and sum(extra_info["parts"]) == int(ground_truth)
    return float(solution_str.split("####")[-1].strip() == ground_truth)
"""


@pytest.mark.parametrize("schema", [None, LARGE], ids=["plain", "large"])
def test_verl_parquet(schema: pa.Schema | None) -> None:
    pq.write_table(pa.Table.from_pylist(VERL, schema=schema), "v.parquet")
    Path("score.py").write_text(VERL_REWARD)
    with pytest.raises(ConfigError, match=r"--answer reward_model\.ground_truth"):
        prepared("v.parquet")
    found, _ = prepared("v.parquet", "score.py:compute_number", answer="reward_model.ground_truth")
    assert {q: p.answer for q, p in found.items()} == {f"{a}+{b}?": str(a + b) for a, b in SUMS}
    with pytest.raises(ConfigError) as error:
        prepared("v.parquet", "score.py:compute_score", answer="reward_model.ground_truth")
    assert "'score'" in error.value.hint


def test_sharegpt_chats() -> None:
    rows = [
        {
            "id": f"c{a}",
            "conversations": [
                {"from": "system", "value": "Be brief."},
                {"from": "human", "value": f"{a}+{b}?"},
                {"from": "gpt", "value": str(a + b)},
            ],
        }
        for a, b in SUMS
    ]
    found, _ = prepared(lines(rows))
    assert found["2+7?"].messages == [{"role": "system", "content": "Be brief."}, user("2+7?")]
    assert found["2+7?"].answer == "9"
    rows[3]["conversations"][1]["from"] = "observation"  # type: ignore[index]
    with pytest.raises(DataError, match=r"line 4: .* has the role 'observation'"):
        prepared(lines(rows), out=Path("other"))


def test_a_folder_of_save_to_disk_is_refused_with_the_remedy() -> None:
    for name in ("one", "both/train", "both/test"):
        Path(name).mkdir(parents=True)
        (Path(name) / "data-00000-of-00001.arrow").write_bytes(b"")
        (Path(name) / "state.json").write_text("{}")
    for folder in ("./one", "./both"):
        with pytest.raises(DataError) as error:
            prepared(folder)
        assert ("save_to_disk" in error.value.what, "to_parquet" in error.value.hint) == (True, True)


def test_a_byte_order_mark_is_fine_and_a_packed_file_names_the_command() -> None:
    rows = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in SUMS]
    found, _ = prepared(lines(rows, encoding="utf-8-sig"))
    assert len(found) == 40
    Path("rows.jsonl.gz").write_bytes(gzip.compress(Path("rows.jsonl").read_bytes()))
    with pytest.raises(DataError, match=r"gunzip rows\.jsonl\.gz"):
        prepared("rows.jsonl.gz")
    Path("packed").mkdir()
    Path("rows.jsonl.gz").rename("packed/train.jsonl.gz")
    with pytest.raises(DataError, match=r"gunzip packed/train\.jsonl\.gz"):
        prepared("./packed")
    with pytest.raises(DataError, match=r"name it \.jsonl"):
        prepared(lines(rows, "lines.json"))


@pytest.mark.parametrize("dump", [json.dumps, repr])
def test_a_chat_that_is_stored_as_text_is_read_as_a_chat(dump: Any) -> None:
    def chat(a: int, b: int) -> list[dict[str, str]]:
        return [{"role": "system", "content": "It's brief."}, user(f"{a}+{b}?")]

    rows = [{"prompt": dump(chat(a, b)), "answer": str(a + b)} for a, b in SUMS]
    found, info = prepared(lines(rows))
    assert found["5+16?"].messages == chat(5, 16)
    assert "40 chats are stored as text" in info.notes
    rows[2]["prompt"] = "[{'role': 'user', 'content': array([1])}]"
    with pytest.raises(DataError, match="line 3: 'prompt' looks like a chat"):
        prepared(lines(rows))


def test_text_that_only_begins_like_a_list_stays_text() -> None:
    rows = [{"question": f"[{a}, {b}] sums to?", "answer": str(a + b)} for a, b in SUMS]
    assert "[1, 4] sums to?" in prepared(lines(rows))[0]


def test_content_parts_are_joined_and_a_place_without_its_image_is_refused() -> None:
    def row(a: int, b: int, kind: str = "text") -> dict[str, Any]:
        parts = [{"type": "text", "text": f"{a}+"}, {"type": kind, "text": f"{b}?"}]
        return {"prompt": [{"role": "user", "content": parts}], "answer": str(a + b)}

    found, _ = prepared(lines([row(a, b) for a, b in SUMS]))
    assert found["1+4?"].answer == "5"
    with pytest.raises(DataError) as error:
        prepared(lines([row(a, b, "image") for a, b in SUMS]))
    assert "1 places of images" in error.value.what
    developer = [
        {"prompt": [{"role": "developer", "content": "x"}, user(f"{a}?")], "answer": "1"} for a, _ in SUMS
    ]
    with pytest.raises(DataError, match="Rename it to system"):
        prepared(lines(developer))


def test_answers_that_are_no_text_name_the_way_to_use_them() -> None:
    """Several right answers, true or false: a reward of one's own gets the column as it is."""
    Path("r.py").write_text("def score(completion, answer): return float(completion in str(answer))")
    for answer in (["a", "b"], True):
        source = lines([{"question": f"{i}?", "answer": answer} for i in range(20)])
        with pytest.raises(DataError) as error:
            prepared(source)
        assert "--no-answer" in error.value.hint
        assert prepared(source, "r.py:score", no_answer=True)[0]["3?"].extra == {"answer": answer}


def test_empty_fields_of_messages_are_fine_and_full_ones_are_not_lost() -> None:
    def row(i: int, **more: Any) -> dict[str, Any]:
        return {"prompt": [user(f"{i}?") | more], "answer": "1"}

    assert len(prepared(lines([row(i, name=None, tool_calls=None) for i in range(20)]))[0]) == 20
    with pytest.raises(DataError, match="also has 'reasoning_content', which the prompt would lose"):
        prepared(lines([row(i, reasoning_content="hm") for i in range(20)]))


def test_trl_data_with_tools_says_what_the_prompt_does_not_show() -> None:
    rows: list[dict[str, Any]] = [
        {"prompt": [user(f"{a}+{b}?")], "tools": TOOLS, "answer": str(a + b)} for a, b in SUMS
    ]
    found, info = prepared(lines(rows))
    assert found["1+4?"].extra["tools"] == TOOLS
    assert "warning: the column 'tools' reaches the reward only" in info.notes
    call = {"role": "assistant", "content": "", "tool_calls": TOOLS}
    history = [{"messages": [user("1+1?"), call, {"role": "tool", "content": "2"}]}] * 4
    with pytest.raises(DataError) as error:
        prepared(lines(history), "length", no_answer=True, settings=("reward.max_length=9",))
    assert "environment" in error.value.hint


def test_trl_prompt_and_completion() -> None:
    rows = [
        {"prompt": [user(f"{a}+{b}?")], "completion": [{"role": "assistant", "content": str(a + b)}]}
        for a, b in SUMS
    ]
    with pytest.raises(ConfigError, match="--answer completion"):
        prepared(lines(rows))
    assert prepared(lines(rows), answer="completion")[0]["1+4?"].answer == "5"


TRL_REWARDS = """
def chat_unannotated(prompts, completions, answer, **kwargs):
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer)]

def chat_annotated(prompts, completions: list[list[dict[str, str]]], answer, **kwargs) -> list[float]:
    return [float(c[0]["content"].strip() == a) for c, a in zip(completions, answer)]

def sometimes_none(completions, answer, **kwargs):
    return [None if int(a) % 2 else float(c.strip() == a) for c, a in zip(completions, answer)]

def wants_ids(prompts, completions, completion_ids, trainer_state, log_metric, answer, **kwargs):
    return [0.0 for _ in completions]

def one_for_all(completions, **kwargs):
    return [1.0]
"""


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("chat_unannotated", "annotate it"),
        ("sometimes_none", "None"),
        ("wants_ids", "Rename the parameter"),
        ("one_for_all", "one number for each"),
    ],
)
def test_trl_rewards_that_cannot_work_are_refused_with_the_remedy(name: str, remedy: str) -> None:
    Path("r.py").write_text(TRL_REWARDS)
    source = lines([{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in SUMS])
    assert prepared(source, "r.py:chat_annotated")[1].best_reward == 1.0
    with pytest.raises(ConfigError) as error:
        prepared(source, f"r.py:{name}")
    assert remedy in error.value.hint


SHAPES = """
import functools
import numpy as np

def _weighted(completions, answer, weight, **kwargs):
    return [weight * float(c.strip() == a) for c, a in zip(completions, answer)]

partial = functools.partial(_weighted, weight=2.0)

class Judge:
    def __call__(self, completions, answer, **kwargs):
        return np.array([float(c.strip() == a) for c, a in zip(completions, answer)], dtype=np.float32)

judge = Judge()
closure = (lambda: lambda completions, answer: [c == a for c, a in zip(completions, answer)])()

def verl_gsm8k(solution_str, ground_truth, method="strict", format_score=0.1, score=1.0):
    return score if solution_str.strip() == ground_truth else format_score

async def slow(completion, answer):
    return completion.strip() == answer

def returns_pairs(completion, answer):
    return completion.strip() == answer, "why"
"""


@pytest.mark.parametrize(
    ("name", "best"), [("partial", 2.0), ("judge", 1.0), ("closure", 1.0), ("verl_gsm8k", 1.0), ("slow", 1.0)]
)
def test_rewards_in_other_shapes(name: str, best: float) -> None:
    Path("shapes.py").write_text(SHAPES)
    source = lines([{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in SUMS])
    assert prepared(source, f"shapes.py:{name}")[1].best_reward == best
    with pytest.raises(ConfigError, match="returned"):
        prepared(source, "shapes.py:returns_pairs")


def test_a_reward_that_imports_a_module_beside_it_says_that_the_file_must_stand_alone() -> None:
    Path("helpers.py").write_text("def same(a, b): return float(a == b)\n")
    Path("mine.py").write_text(
        "from helpers import same\ndef score(completion, answer): return same(completion, answer)\n"
    )
    source = lines([{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in SUMS])
    with pytest.raises(ConfigError) as error:
        prepared(source, "mine.py:score")
    assert "stand alone" in error.value.hint
    Path("helpers.py").unlink()
    with pytest.raises(ConfigError) as error:
        prepared(source, "mine.py:score")
    assert error.value.hint == "Fix that file."


def test_whole_numbers_that_became_floats_and_missing_answers() -> None:
    rows: list[dict[str, Any]] = [{"question": f"{a}+{b}?", "answer": float(a + b)} for a, b in SUMS]
    rows[7]["answer"] = 1.5
    pq.write_table(pa.Table.from_pylist(rows), "f.parquet")
    found, info = prepared("f.parquet")
    assert (found["5+16?"].answer, found["7+22?"].answer) == ("21", "1.5")
    assert "39 answers are whole numbers stored as 51.0" in info.notes
    for missing in (None, float("nan"), " "):
        holed = [{**row, "answer": str(row["answer"]) if missing == " " else row["answer"]} for row in rows]
        holed[4]["answer"] = missing
        pq.write_table(pa.Table.from_pylist(holed), "n.parquet")
        with pytest.raises(DataError, match=r"row 5 has an empty 'answer'"):
            prepared("n.parquet")
        found, info = prepared("n.parquet", drop_failing=True)
        assert (len(found), "left out 1 of 40 rows that cannot be read" in info.notes) == (39, True)


def test_shards_are_joined_and_contradicting_answers_are_counted() -> None:
    Path("shards/data").mkdir(parents=True)
    rows = [{"question": f"{a}+{b}?", "answer": str(a + b)} for a, b in SUMS]
    for number, part in enumerate((rows[:20], rows[20:])):
        pq.write_table(pa.Table.from_pylist(part), f"shards/data/train-0000{number}-of-00002.parquet")
    assert len(prepared("./shards")[0]) == 40
    twice = [{"question": f"q {i // 2}", "answer": str(i % 2)} for i in range(40)]
    assert "warning: 20 questions occur with different answers" in prepared(lines(twice))[1].notes
