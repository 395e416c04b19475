from __future__ import annotations

import re
from itertools import islice

import pytest

from skylite.data.data_prep_file import load_dataset
from skylite.errors import DataError
from skylite.rewards.gsm8k import final_number
from tests.unit.data_cases import synthetic

FIRST_PROBLEM = (
    "Mei has 16 crayons. She finds 18 more and gives 3 to Yusuf. How many crayons are left?",
    "16 + 18 = <<16+18=34>>34\n34 - 3 = <<34-3=31>>31\n#### 31",
)
ANNOTATION = re.compile(r"<<(\d+)([-+*/])(\d+)=(\d+)>>(\d+)")


@pytest.mark.parametrize("difficulty", synthetic.DIFFICULTIES)
def test_every_step_is_correct_and_leads_to_the_answer(difficulty: int) -> None:
    for problem in islice(synthetic.problems(difficulty, seed=5), 500):
        *lines, last = problem["answer"].split("\n")
        steps = [ANNOTATION.search(line) for line in lines]
        assert len(lines) == problem["difficulty"] == difficulty
        for line, step in zip(lines, steps, strict=True):
            assert step is not None
            left, operator, right, result, shown = step.groups()
            value = {
                "+": int(left) + int(right),
                "-": int(left) - int(right),
                "*": int(left) * int(right),
                "/": int(left) / int(right),
            }
            assert value[operator] == int(result) == int(shown) > 0
            assert line == f"{left} {operator} {right} = {step[0]}"
        assert steps[-1] is not None
        assert last == f"#### {steps[-1][5]}"
        assert final_number(problem["answer"]) == int(steps[-1][5])


@pytest.mark.parametrize("difficulty", synthetic.DIFFICULTIES)
def test_the_numbers_of_the_calculation_are_in_the_question(difficulty: int) -> None:
    for problem in islice(synthetic.problems(difficulty, seed=5), 200):
        assert not re.search(r"[{}\[\]|]", problem["question"])
        known = {int(n) for n in re.findall(r"\d+", problem["question"])} | {2}  # "doubles" and "half"
        for left, _, right, result, _ in ANNOTATION.findall(problem["answer"]):
            assert {int(left), int(right)} <= known
            known.add(int(result))


@pytest.mark.parametrize("difficulty", synthetic.DIFFICULTIES)
def test_at_least_ten_templates_are_all_used(difficulty: int) -> None:
    assert (
        len({question for question, _ in synthetic.TEMPLATES[difficulty]})
        == len(synthetic.TEMPLATES[difficulty])
        >= 10
    )
    assert all(len(steps.split(";")) == difficulty for _, steps in synthetic.TEMPLATES[difficulty])


def test_the_problems_of_a_seed_do_not_depend_on_their_number() -> None:
    first = list(islice(synthetic.problems(2, seed=1), 50))
    assert list(islice(synthetic.problems(2, seed=1), 300))[:50] == first
    assert list(islice(synthetic.problems(2, seed=2), 50)) != first


def test_the_problems_equal_those_of_the_published_results() -> None:
    first = next(synthetic.problems(2, seed=0))
    assert (first["question"], first["answer"]) == FIRST_PROBLEM


def test_splits_are_distinct_counted_and_balanced() -> None:
    make = load_dataset("gsm8k").synthetic_rows
    assert make is not None
    tables = {split: make(split, 0, (), None) for split in ("train", "validation", "test")}
    questions = [row.values["question"] for table in tables.values() for row in table.rows]
    assert len(set(questions)) == len(questions)
    for split, rows, each in (("train", 4096, 1024), ("validation", 512, 128), ("test", 2048, 512)):
        difficulties = [row.values["difficulty"] for row in tables[split].rows]
        assert len(difficulties) == rows
        assert [difficulties.count(d) for d in synthetic.DIFFICULTIES] == [each] * 4
    assert make("train", 0, (), None) == tables["train"]
    assert make("train", 1, (), None) != tables["train"]


def test_difficulties_and_limit_select_rows() -> None:
    make = load_dataset("gsm8k").synthetic_rows
    assert make is not None
    rows = make("train", 0, (1, 3), 101).rows
    assert len(rows) == 101
    assert {row.values["difficulty"] for row in rows} == {1, 3}
    assert len(make("test", 0, (1,), None).rows) == 1024
    held_out = {
        row.values["question"]
        for split in ("test", "validation")
        for row in make(split, 0, (1,), 10_000).rows
    }
    assert not held_out & {row.values["question"] for row in make("train", 0, (1,), 10_000).rows}
    with pytest.raises(DataError, match=r"no synthetic difficulty \[9\]"):
        make("train", 0, (1, 9), None)
