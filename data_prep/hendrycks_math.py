"""MATH: 12,500 competition problems with levels 1 to 5 and seven subjects (arXiv 2103.03874, MIT license).

Training: the 7,500 training problems, less 500 for validation. Test: the 500 problems of MATH-500 (PRM800K,
arXiv 2305.20050), else all 5,000 test problems. The level is the difficulty. `--where subject=algebra` and
`--where level=1,2` choose problems.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from skylite.data.hub import hub_table
from skylite.data.raw_rows import Row, Table, hold_out, join_tables, read_table
from skylite.errors import DataError
from skylite.types import Message, Prompt

NAME = "hendrycks_math"
REWARD = "math"
SYSTEM = "Solve the problem step by step. Put the final answer in \\boxed{}."
FEW_SHOT: list[Message] = []
DROP_FAILING = True  # a few reference answers are not comparable formulas

HUB, HUB_500 = "EleutherAI/hendrycks_math", "HuggingFaceH4/MATH-500"
SUBJECTS = (
    "algebra", "counting_and_probability", "geometry", "intermediate_algebra", "number_theory", "prealgebra",
    "precalculus",
)  # fmt: skip
FILES_500 = ("test500.jsonl", "MATH-500/test.jsonl", "math_splits/test.jsonl")
VALIDATION_ROWS, VALIDATION_SEED = 500, 20305
"""Fixed, so that the validation problems do not depend on --seed."""


def load_rows(split: str, source: Path | None) -> Table:
    """Rows of a split from the hub, or from a folder: the released MATH, or a copy of the hub's files."""
    if split == "test":
        return _test(source)
    table = _all(source, "train")
    train, validation = hold_out(table, VALIDATION_ROWS, VALIDATION_SEED)
    return validation if split == "validation" else train


def _test(source: Path | None) -> Table:
    if source is None:
        return _normal(hub_table(HUB_500, "test.jsonl"), "test: the 500 problems of MATH-500")
    for file in FILES_500:
        if (source / file).is_file():
            return _normal(read_table(source / file, "folder"), f"test: the problems of {file}")
    table = _all(source, "test")
    return _normal(table, f"test: all {len(table.rows)} test problems, because {source} has no MATH-500")


def _all(source: Path | None, split: str) -> Table:
    """The problems of all subjects."""
    if source is None:
        file = f"{split}-00000-of-00001.parquet"
        tables = [hub_table(HUB, f"{subject}/{file}") for subject in SUBJECTS]
        return _normal(join_tables(tables, f"{HUB} ({split})"))
    found = sorted((source / split).glob("*/*.json"), key=lambda p: (p.parent.name, len(p.stem), p.stem))
    found = found or sorted(source.glob(f"*/{split}-*.parquet")) or sorted(source.glob(f"{split}.jsonl"))
    if not found:
        raise DataError(
            f"{source} has no {split}/SUBJECT/*.json, SUBJECT/{split}-*.parquet or {split}.jsonl.",
            "Give the folder of the released MATH, or a copy of the hub's files.",
        )
    return _normal(join_tables([read_table(path, "folder") for path in found], f"{source} ({split})"))


def _normal(table: Table, note: str = "") -> Table:
    """The rows with columns of one form: problem, solution, answer, level (a number) and subject.

    Leaves out rows without an answer, with a note: two training problems have an empty \\boxed{}.
    """
    rows = [
        Row(index=row.index, where=row.where, values=_values(row, answer))
        for row in table.rows
        if (answer := row.text("answer") if "answer" in row.values else last_boxed(row.text("solution")))
    ]
    if not rows:
        raise DataError(f"{table.source}: no solution has a \\boxed answer.", "Give the released MATH.")
    missing = len(table.rows) - len(rows)
    left_out = f"left out {missing} of {len(table.rows)} rows without a \\boxed answer" if missing else ""
    return replace(table, rows=rows, note="; ".join(filter(None, (note, left_out))))


def _values(row: Row, answer: str) -> dict[str, object]:
    solution = row.text("solution")
    level = row.text("level").removeprefix("Level ")
    subject = row.text("subject" if "subject" in row.values else "type").lower()
    return {
        "problem": row.text("problem"),
        "solution": solution,
        "answer": answer,
        "level": int(level) if level.isdecimal() else 0,  # two problems have the level "?"
        "subject": subject.replace(" & ", "_and_").replace(" ", "_"),
    }


def to_prompt(row: Row, prompt_id: str) -> Prompt:
    """System text and problem. The reward gets level and subject too."""
    return Prompt(
        id=prompt_id,
        messages=[{"role": "system", "content": SYSTEM}, {"role": "user", "content": row.text("problem")}],
        answer=row.text("answer"),
        source=NAME,
        difficulty=row.value("level"),
        extra={"level": row.value("level"), "subject": row.value("subject")},
    )


def reference(row: Row) -> str:
    """The worked solution of the data set."""
    return row.text("solution")


def last_boxed(text: str) -> str | None:
    """The content of the last \\boxed{...} or \\fbox{...}, or what follows "\\boxed "; None without one."""
    start = max(text.rfind("\\boxed"), text.rfind("\\fbox"))
    if start < 0:
        return None
    rest = text[start:].removeprefix("\\boxed").removeprefix("\\fbox").lstrip()
    if not rest.startswith("{"):
        return rest.partition("$")[0].strip() or None
    depth = 0
    for position, character in enumerate(rest):
        depth += (character == "{") - (character == "}")
        if depth == 0:
            return rest[1:position].strip() or None
    return None
