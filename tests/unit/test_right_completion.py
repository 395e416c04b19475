"""`skylite prepare` finds the form that the user's own reward wants, and what it gives for a right answer."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skylite.data.prompts import PromptFileInfo, read_prompts
from skylite.errors import ConfigError, DataError
from skylite.rewards.call_rewards import Item
from skylite.rewards.right_completion import PROBES, USUAL_FORMS, fill, find_form, usual_score
from skylite.types import Prompt
from tests.prepared import prepare
from tests.unit.data_cases import prompt

REWARDS = r"""
import re

def tags(text):
    found = re.search(r"<answer>(.*?)</answer>", text, re.DOTALL)
    return found and found[1].strip()

def r1(completion, answer):
    return float(tags(completion) == answer)

def bonus(completion, answer):
    return 0.2 * (tags(completion) is not None) + float(tags(completion) == answer)

def open_r1(completions, answer, **kwargs):
    form = r"<think>\n.*?\n</think>\n<answer>\n.*?\n</answer>"
    return [float(bool(re.fullmatch(form, c, re.DOTALL))) * (1 + (tags(c) == a))
            for c, a in zip(completions, answer)]

def boxed(completion, answer):
    return float("\\boxed{" + answer + "}" in completion)

def error(completion, answer):
    return -abs(int(completion) - int(answer)) if completion.isdecimal() else -1000

def weighted(completion, answer, level):
    return level * float(tags(completion) == answer)

def final(completion, answer):
    return float(completion == f"<final>{answer}</final>")

def style(completion):
    return 0.5

def raises(completion, answer):
    return float(completion.split("<answer>")[1] == answer)

def verl(data_source, solution_str, ground_truth, extra_info):
    return {"score": 1.0, "acc": True}

def nothing(completion, answer):
    return None
"""


@pytest.fixture(autouse=True)
def in_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("r.py").write_text(REWARDS)
    write([{"question": f"{i} + 1?", "answer": str(i + 1), "level": 1 + i % 7} for i in range(40)])


def write(rows: list[dict[str, object]]) -> None:
    Path("rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def prepared(name: str, **flags: object) -> tuple[list[Prompt], PromptFileInfo]:
    return read_prompts(prepare("rows.jsonl", reward=f"r.py:{name}", **flags) / "train.parquet")


@pytest.mark.parametrize(
    ("name", "template", "best"),
    [
        ("r1", "<answer>{answer}</answer>", 1.0),
        ("bonus", "<answer>{answer}</answer>", 1.2),
        ("open_r1", "<think>\n1 + 1 = 2\n</think>\n<answer>\n{answer}\n</answer>", 2.0),
        ("boxed", "\\boxed{{answer}}", 1.0),
        ("error", "{answer}", 0.0),
        ("weighted", "<answer>{answer}</answer>", None),
    ],
)
def test_usual_rewards_are_accepted_with_their_form_and_best_value(
    name: str, template: str, best: float | None
) -> None:
    rows, info = prepared(name)
    assert len(rows) == 36
    assert (info.answer_template, info.best_reward) == (template, best)
    assert {p.answer for p in rows} <= {str(i) for i in range(1, 41)}, "the answers stay bare"


def test_the_reward_is_not_blamed_on_a_row() -> None:
    with pytest.raises(ConfigError, match="in no usual form") as error:
        prepared("final")
    assert "line" not in str(error.value)
    assert not Path("data").exists()
    assert prepared("final", answer_template="<final>{answer}</final>")[1].best_reward == 1.0
    with pytest.raises(ConfigError, match="no more than a wrong one"):
        prepared("final", answer_template="<end>{answer}</end>")


def test_a_row_that_scores_less_than_the_others_is_named_and_the_user_can_allow_it() -> None:
    rows: list[dict[str, object]] = [{"question": f"{i} + 1?", "answer": str(i + 1)} for i in range(40)]
    rows[17]["answer"] = "1</answer>8"  # the reward reads 1 only
    write(rows)
    with pytest.raises(
        DataError, match=r"line 18: .* scores 0.2 under .*; those of most other rows score 1.2"
    ):
        prepared("bonus")
    assert prepared("bonus", best_reward=0.2)[1].best_reward == 0.2
    notes = prepared("bonus", drop_failing=True, out=Path("dropped"))[1].notes
    assert "left out 1 of 40 rows" in notes


@pytest.mark.parametrize("name", ["raises", "verl", "nothing"])
def test_a_broken_reward_is_blamed_itself(name: str) -> None:
    with pytest.raises(ConfigError, match=f"The reward .*r.py:{name} does not work") as error:
        prepared(name)
    assert "rows.jsonl" not in str(error.value)
    assert "row" not in error.value.hint.split()


def test_a_reward_that_looks_at_no_answer_is_only_a_warning() -> None:
    assert "no more than a wrong one" in prepared("style")[1].notes


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        ({"answer_template": "<a></a>"}, "has no {answer}"),
        ({"best_reward": 3.0}, "No right completion reaches --best-reward 3"),
        ({"best_reward": 1.0, "no_answer": True}, "cannot be used with --no-answer"),
    ],
)
def test_flags_that_do_not_fit(flags: dict[str, object], reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        prepared("bonus", **flags)


def test_worked_examples_show_the_form_that_the_reward_wants() -> None:
    few = prepared("r1", few_shot=2)[1].few_shot
    assert [turn["content"] for turn in few[1::2]] == ["<answer>1</answer>", "<answer>2</answer>"]
    with pytest.raises(ConfigError, match="wants thoughts before the answer"):
        prepared("open_r1", few_shot=2)


def test_no_answer_with_a_reward_that_asks_for_one() -> None:
    write([{"question": f"{i}?"} for i in range(40)])
    rows, info = prepared("r1", no_answer=True)
    assert (rows[0].answer, rows[0].extra, info.has_answers) == ("", {"answer": ""}, False)
    write([{"question": f"{i}?", "answer": ["1", "2"]} for i in range(40)])
    assert prepared("r1", no_answer=True)[0][0].extra == {"answer": ["1", "2"]}, "the column itself"


def test_the_answer_of_a_row_may_hold_braces() -> None:
    assert fill("\\boxed{{answer}}", "{x}") == "\\boxed{{x}}"
    assert all(fill(form, "7").count("7") == 1 for form in USUAL_FORMS)


def test_a_form_is_tried_until_nothing_can_be_better() -> None:
    calls: list[Item] = []

    def score(items: list[Item]) -> list[float]:
        calls.extend(items)
        return [float(completion == row.answer) for row, completion in items]

    rows = [prompt(id=str(i), answer=str(i)) for i in range(PROBES)]
    form = find_form(score, rows)  # type: ignore[arg-type]
    assert (form.template, form.best, form.floor, form.beats_wrong) == ("{answer}", 1.0, 0.0, True)
    assert len(calls) == 3 * PROBES
    same = find_form(score, [prompt(id=str(i), answer="yes") for i in range(3)])  # type: ignore[arg-type]
    assert same.beats_wrong, "an empty completion is wrong where all answers are equal"


def test_usual_score() -> None:
    assert usual_score([1.2, 0.2 + 1.0, 0.2]) == 1.2
    assert usual_score([1.0, 2.0]) is None
