"""The data sets Countdown and MATH: generated or read, split, and scored."""

from __future__ import annotations

import json
import time
from fractions import Fraction
from pathlib import Path
from typing import Any

import pytest

from skylite.config.bundled import bundled_folder
from skylite.data.prompts import read_prompts
from skylite.errors import DataError, SkyliteError
from skylite.rewards.countdown import countdown, evaluate
from skylite.types import Prompt
from skylite.user_functions import import_file
from tests.prepared import prepare

SPLITS = ("train", "validation", "test")


@pytest.fixture(autouse=True)
def in_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)


def read(folder: Path) -> dict[str, list[Prompt]]:
    return {split: read_prompts(folder / f"{split}.parquet")[0] for split in SPLITS}


@pytest.mark.parametrize(
    ("expression", "value", "used"),
    [
        ("1+2*3", Fraction(7), [1, 2, 3]),
        (" ( 1 + 2 ) * 3 ", Fraction(9), [1, 2, 3]),
        ("8/3/2", Fraction(4, 3), [8, 3, 2]),
        ("10 - 4 - 3", Fraction(3), [10, 4, 3]),
        ("3 / (7 - 7 / 8)", Fraction(24, 49), [3, 7, 7, 8]),
        ("((((5))))", Fraction(5), [5]),
    ],
)
def test_expressions_have_their_exact_value(expression: str, value: Fraction, used: list[int]) -> None:
    assert evaluate(expression) == (value, used)


@pytest.mark.parametrize(
    "expression",
    [
        "", "1+", "(1", "1)", "1 2", "-1", "2**3", "2//1", "1.5", "a", "__import__('os')", "1,2", "1e9", "²",
        "1" * 10, "(" * 150 + "1" + ")" * 150, "1+" * 200 + "1",
    ],
)  # fmt: skip
def test_other_text_is_no_expression(expression: str) -> None:
    with pytest.raises(ValueError, match=r"it |is not|does not|parenthesis"):
        evaluate(expression)


@pytest.mark.parametrize(
    ("completion", "score"),
    [
        ("<answer>(7 + 3) * 2</answer>", 1.0),
        ("7 + 3 = 10\n<answer>1</answer> no, <answer> 2*(3+7) </answer>", 1.0),
        ("<answer>(7 + 3) * 2</answer> or <answer>20</answer>", 0.0),
        ("<answer>7 * 3 - 1</answer>", 0.0),
        ("<answer>7 + 3 * 2</answer>", 0.0),
        ("<answer>2 * (7 + 3) * (3 - 2)</answer>", 0.0),
        ("<answer>2 / (7 - 7)</answer>", 0.0),
        ("<answer>(7 + 3) * 2 = 20</answer>", 0.0),
        ("(7 + 3) * 2", 0.0),
        ("<answer>(7 + 3) * 2", 0.0),
    ],
)
def test_each_number_is_used_once(completion: str, score: float) -> None:
    assert countdown(completion, numbers=[2, 3, 7], target=20) == score


@pytest.mark.parametrize("columns", [{"numbers": [1], "target": "2"}, {"numbers": ["1"], "target": 2}])
def test_columns_of_another_type_are_refused(columns: dict[str, Any]) -> None:
    with pytest.raises(DataError, match="'numbers' and 'target' do not hold integers"):
        countdown("<answer>1</answer>", **columns)


def test_data_without_the_columns_is_refused(tmp_path: Path) -> None:
    rows = [json.dumps({"question": f"{i}?", "answer": "1 + 2", "numbers": [1, 2]}) for i in range(9)]
    (tmp_path / "mine.jsonl").write_text("\n".join(rows))
    with pytest.raises(DataError, match="it asks for target, but prompt mine/train/"):
        prepare("mine.jsonl", reward="countdown")


def test_countdown_is_deterministic_and_its_splits_do_not_overlap() -> None:
    one = read(prepare("countdown", limit=300, seed=3, difficulty="1,4", out=Path("one")))
    two = read(prepare("countdown", limit=300, seed=3, difficulty="1,4", out=Path("two")))
    assert one == two
    assert read(prepare("countdown", limit=300, seed=4, difficulty="1,4", out=Path("three"))) != one
    assert [len(one[s]) for s in SPLITS] == [300, 256, 512]
    everything = [p for s in SPLITS for p in one[s]]
    assert len({(*sorted(p.extra["numbers"]), p.extra["target"]) for p in everything}) == len(everything)
    for p in everything:
        value, used = evaluate(p.answer)
        assert value == p.extra["target"]
        assert sorted(used) == sorted(p.extra["numbers"])
        assert len(used) == p.difficulty + 1
    assert {p.difficulty for p in one["train"]} == {1, 4}


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"synthetic": True}, "countdown is always generated"),
        ({"difficulty": "6"}, r"Countdown has no difficulty \[6\]. Use \[1, 2, 3, 4, 5\]"),
        ({"difficulty": "1", "limit": 90_000}, "Countdown has only .* problems of difficulty 1"),
    ],
)
def test_countdown_refuses_what_it_cannot_make(flags: dict[str, Any], reason: str) -> None:
    with pytest.raises(SkyliteError, match=reason):
        prepare("countdown", **flags)
    assert not Path("data").exists()


PROBLEMS = (
    ("What is $\\sqrt{52}$?", "It is $\\boxed{2\\sqrt{13}}.$", "Level 2", "Algebra"),
    ("Solve.", "So $x=\\frac{1}{2}$, hence $\\boxed{\\frac{1}{2}}$.", "Level 5", "Counting & Probability"),
    ("Who?", "Thus \\boxed{\\text{Evelyn}}.", "Level ?", "Number Theory"),
)


def released(folder: Path, split: str, count: int) -> None:
    """As the released MATH: SPLIT/SUBJECT/NUMBER.json."""
    for number in range(count):
        problem, solution, level, subject = PROBLEMS[number % 3]
        row = {"problem": f"{number}. {problem}", "level": level, "type": subject, "solution": solution}
        path = folder / split / subject.lower().replace(" & ", "_and_").replace(" ", "_") / f"{number}.json"
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(row), encoding="utf-8")


def test_math_from_the_released_folder(tmp_path: Path) -> None:
    released(tmp_path / "MATH", "train", 30)
    released(tmp_path / "MATH", "test", 6)
    folder = prepare("hendrycks_math", source=tmp_path / "MATH")
    splits = read(folder)
    assert [len(splits[s]) for s in SPLITS] == [27, 3, 6]
    found = {p.messages[-1]["content"]: p for p in splits["test"]}
    assert found["0. What is $\\sqrt{52}$?"].answer == "2\\sqrt{13}"
    assert found["1. Solve."].extra == {"level": 5, "subject": "counting_and_probability"}
    assert [found[f"{i}. Who?"].difficulty for i in (2, 5)] == [0, 0]
    info = read_prompts(folder / "test.parquet")[1]
    assert "test: all 6 test problems, because " in info.notes


def test_math_500_is_the_test_split_if_it_is_there(tmp_path: Path) -> None:
    released(tmp_path / "MATH", "train", 30)
    row = {"problem": "1 + 1?", "solution": "\\boxed{2}", "answer": "2", "subject": "Prealgebra", "level": 1}
    wrong = row | {"problem": "2 + 2?", "answer": "5"}
    (tmp_path / "MATH" / "test500.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(wrong)}\n")
    splits = read(prepare("hendrycks_math", source=tmp_path / "MATH"))
    assert [p.messages[-1]["content"] for p in splits["test"]] == ["1 + 1?"]
    notes = read_prompts(Path("data/hendrycks_math/test.parquet"))[1].notes
    assert "test: the problems of test500.jsonl" in notes
    assert "left out 1 of 32 rows" in notes


def test_rows_with_an_empty_box_are_left_out_with_a_note(tmp_path: Path) -> None:
    """As in the released MATH: train/number_theory/7115.json and 7117.json."""
    released(tmp_path / "MATH", "train", 30)
    released(tmp_path / "MATH", "test", 6)
    row = {
        "problem": "None?",
        "level": "Level 5",
        "type": "Number Theory",
        "solution": "There are $\\boxed{}$.",
    }
    for name in ("7115.json", "7117.json"):
        (tmp_path / "MATH" / "train" / "number_theory" / name).write_text(json.dumps(row))
    folder = prepare("hendrycks_math", source=tmp_path / "MATH")
    assert [len(read(folder)[s]) for s in SPLITS] == [27, 3, 6]
    notes = read_prompts(folder / "train.parquet")[1].notes
    assert notes.count("left out 2 of 32 rows without a \\boxed answer") == 1
    for path in (tmp_path / "MATH" / "test").glob("*/*.json"):
        path.write_text(json.dumps(row))
    with pytest.raises(DataError, match=r"MATH \(test\): no solution has a .boxed answer"):
        prepare("hendrycks_math", source=tmp_path / "MATH")


def test_math_by_subject_and_level(tmp_path: Path) -> None:
    released(tmp_path / "MATH", "train", 60)
    released(tmp_path / "MATH", "test", 6)
    flags = {"source": tmp_path / "MATH", "where": ["subject=algebra,number_theory", "level=2"]}
    splits = read(prepare("hendrycks_math", **flags))
    assert {p.extra["subject"] for s in SPLITS for p in splits[s]} == {"algebra"}


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("\\boxed{1} then \\boxed{\\frac{1}{2}}.", "\\frac{1}{2}"),
        ("\\fbox{7}", "7"),
        ("so $\\boxed 5$.", "5"),
        ("\\boxed{\\left\\{1\\right\\}}", "\\left\\{1\\right\\}"),
        ("\\boxed{1", None),
        ("none", None),
    ],
)
def test_the_last_box_is_the_answer(text: str, answer: str | None) -> None:
    module = import_file(bundled_folder("data_prep") / "hendrycks_math.py", "data_prep file")
    assert module.last_boxed(text) == answer


def test_beginnings_without_an_end_take_time_in_proportion_to_the_text() -> None:
    text = "<answer>" * 200_000
    started = time.process_time()
    assert countdown(text, numbers=[1], target=1) == 0.0
    assert countdown(text + "1</answer><answer>", numbers=[1], target=1) == 0.0
    assert countdown(text + "</answer><answer> 1</answer><answer>2", numbers=[1], target=1) == 1.0
    assert time.process_time() - started < 1
