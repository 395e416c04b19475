"""GSM8K: 7,473 training and 1,319 test grade-school word problems (arXiv 2110.14168, MIT license).

To add a data set, copy this file, edit it, and run `skylite prepare path/to/copy.py`. It defines:

- NAME, REWARD, SYSTEM, FEW_SHOT: the data set's name, its reward, the system text and the few-shot examples
- `load_rows`: reads the raw rows of a split (a generated data set has none)
- `to_prompt`: turns a row into a prompt
- `reference`: a completion of the row that must score 1.0
- `synthetic_rows` (optional): generates problems, for `skylite prepare --synthetic`

Raise DataError with `row.where` in its text, so that the user finds a bad row.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import islice
from math import ceil
from pathlib import Path

from skylite.config.bundled import bundled_folder
from skylite.data.hub import hub_table
from skylite.data.raw_rows import Row, Table, generated_table, hold_out, read_table
from skylite.errors import DataError
from skylite.types import Message, Prompt
from skylite.user_functions import import_file

NAME = "gsm8k"
REWARD = "gsm8k"
SYSTEM = "Solve the problem. Write each calculation on its own line, then #### and the answer."
FEW_SHOT: list[Message] = [
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
"""Fixed, so that the validation problems do not depend on --seed."""
SYNTHETIC = import_file(bundled_folder("data_prep") / "synthetic/gsm8k_problems.py", "generator")
SYNTHETIC_TRAIN_ROWS = 4096
SYNTHETIC_HELD_OUT = {"test": (1024, 512), "validation": (512, 128)}
"""split -> (minimum rows in total, minimum rows of each difficulty)."""


def load_rows(split: str, source: Path | None) -> Table:
    """Rows of a split, from the released train.jsonl and test.jsonl in `source`, or from the hub."""
    part = "test" if split == "test" else "train"
    hub_file = f"main/{part}-00000-of-00001.parquet"
    table = hub_table(HUB, hub_file) if source is None else read_table(source / f"{part}.jsonl", "folder")
    if split == "test":
        return table
    train, validation = hold_out(table, VALIDATION_ROWS, VALIDATION_SEED)
    return validation if split == "validation" else train


def synthetic_rows(split: str, seed: int, difficulty: Sequence[int], limit: int | None) -> Table:
    """Generated problems, equally many of each difficulty. The splits do not overlap."""
    difficulties = sorted(set(difficulty)) or list(SYNTHETIC.DIFFICULTIES)
    if unknown := set(difficulties) - set(SYNTHETIC.DIFFICULTIES):
        raise DataError(
            f"There is no synthetic difficulty {sorted(unknown)}.", f"Use {list(SYNTHETIC.DIFFICULTIES)}."
        )
    rows_of_each = {
        name: max(ceil(total / len(difficulties)), each) for name, (total, each) in SYNTHETIC_HELD_OUT.items()
    }
    rows_of_each["train"] = ceil((limit or SYNTHETIC_TRAIN_ROWS) / len(difficulties))
    start = {"test": 0, "validation": rows_of_each["test"]}
    start["train"] = start["validation"] + rows_of_each["validation"]
    by_difficulty = [
        list(islice(SYNTHETIC.problems(difficulty, seed), start[split], start[split] + rows_of_each[split]))
        for difficulty in difficulties
    ]
    rows = [row for same in zip(*by_difficulty, strict=True) for row in same]
    rows = rows[: limit if split == "train" else None]
    return generated_table(rows, "synthetic", f"skylite synthetic (seed {seed}, difficulty {difficulties})")


def to_prompt(row: Row, prompt_id: str) -> Prompt:
    """System text, few-shot examples, question. The difficulty counts the calculator annotations <<...>>."""
    worked, mark, answer = row.text("answer").rpartition("####")
    if not mark:
        raise DataError(f"{row.where}: the answer has no '####'.", "End it with '#### NUMBER'.")
    question: Message = {"role": "user", "content": row.text("question")}
    messages: list[Message] = [{"role": "system", "content": SYSTEM}, *FEW_SHOT, question]
    return Prompt(
        id=prompt_id, messages=messages, answer=answer.strip(), source=NAME, difficulty=worked.count("<<")
    )


def reference(row: Row) -> str:
    """The worked answer of the data set, without the calculator annotations <<...>>."""
    return re.sub("<<.*?>>", "", row.text("answer"))
