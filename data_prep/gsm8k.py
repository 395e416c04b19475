"""GSM8K: 7,473 + 1,319 difficulty-school word problems (arXiv 2110.14168, https://github.com/openai/difficulty-school-math, MIT).

To add a data set, copy this file, edit it, and run `skylite prepare path/to/copy.py` (or put it in ./data_prep and use its name):
NAME, SYSTEM, EXAMPLES and REWARD say what it is; `load_rows` reads raw rows; `to_prompt` makes a prompt of one; `reference` gives
a completion of it that must score 1.0. `synthetic_rows` is optional. A DataError that names `row.where` points a person at the row.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from math import ceil
from pathlib import Path

from skylite.data import synthetic as synthetic
from skylite.data.sources import Row, Table, generated_table, hold_out, hub_table, read_table
from skylite.errors import DataError
from skylite.types import Message, Prompt

NAME = "gsm8k"
REWARD = "gsm8k"
SYSTEM = "Solve the problem. Write each calculation on its own line, then #### and the answer."
EXAMPLES: list[Message] = [
    {"role": "user", "content": "Nora has 5 cups. She buys 4 more. How many cups does she have now?"},
    {"role": "assistant", "content": "5 + 4 = 9\n#### 9"},
    {"role": "user", "content": "Jim had 12 nuts and ate 5. How many are left?"},
    {"role": "assistant", "content": "12 - 5 = 7\n#### 7"},
    {"role": "user", "content": "Ella has 3 bags of 6 limes and 2 more limes. How many limes is that?"},
    {"role": "assistant", "content": "3 * 6 = 18\n18 + 2 = 20\n#### 20"},
]

HUB = "openai/gsm8k"
VALIDATION_ROWS = 512
VALIDATION_SEED = 20110
"""Fixed: the validation problems are the same ones whatever --seed is."""
SYNTHETIC_TRAIN_ROWS = 4096
SYNTHETIC_HELD_OUT = {"test": (1024, 512), "validation": (512, 128)}
"""split -> (rows in all, rows of each difficulty), whichever is more."""


def load_rows(split: str, source: Path | None) -> Table:
    """Rows of a split out of the released train.jsonl and test.jsonl in `source`, or out of the hub."""
    part = "test" if split == "test" else "train"
    hub_file = f"main/{part}-00000-of-00001.parquet"
    table = hub_table(HUB, hub_file) if source is None else read_table(source / f"{part}.jsonl", "folder")
    if split == "test":
        return table
    train, validation = hold_out(table, VALIDATION_ROWS, VALIDATION_SEED)
    return validation if split == "validation" else train


def synthetic_rows(split: str, seed: int, difficulty: Sequence[int], limit: int | None) -> Table:
    """Generated problems; every difficulty's run of distinct problems is cut into test, validation and train, so that none overlap."""
    unknown = sorted(set(difficulty) - set(synthetic.GRADES))
    if unknown:
        raise DataError(
            f"The synthetic has no difficulty {unknown}.", f"Its difficulty are {list(synthetic.GRADES)}."
        )
    difficulty = sorted(set(difficulty)) or list(synthetic.GRADES)
    rows_of_each = {
        name: max(ceil(total / len(difficulty)), each) for name, (total, each) in SYNTHETIC_HELD_OUT.items()
    }
    rows_of_each["train"] = ceil((limit or SYNTHETIC_TRAIN_ROWS) / len(difficulty))
    start = {
        "test": 0,
        "validation": rows_of_each["test"],
        "train": rows_of_each["test"] + rows_of_each["validation"],
    }[split]
    runs = [
        list(islice(synthetic.problems(difficulty, seed), start, start + rows_of_each[split]))
        for difficulty in difficulty
    ]
    mixed = [problem for row in zip(*runs, strict=True) for problem in row]
    rows = [
        {"question": p.question, "answer": p.answer, "difficulty": p.difficulty}
        for p in mixed[: limit if split == "train" else None]
    ]
    return generated_table(rows, "synthetic", f"skylite synthetic (seed {seed}, difficulty {difficulty})")


def to_prompt(row: Row, prompt_id: str) -> Prompt:
    """System text, worked examples, the question. The difficulty is the number of calculator annotations."""
    worked, mark, answer = row.text("answer").rpartition("####")
    if not mark:
        raise DataError(f"{row.where}: the answer has no '####'.", "GSM8K answers end in '#### NUMBER'.")
    question: Message = {"role": "user", "content": row.text("question")}
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, *EXAMPLES, question]
    return Prompt(
        id=prompt_id, messages=messages, answer=answer.strip(), source=NAME, difficulty=worked.count("<<")
    )


def reference(row: Row) -> str:
    """The worked answer as released."""
    return row.text("answer")
