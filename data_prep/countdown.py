"""Countdown: combine given numbers with + - * / to a target. Generated, and scored by its own reward.

The difficulty is the number of operations: 1 to 5, for two to six numbers.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from itertools import islice
from math import ceil
from typing import Any

from skylite.data.raw_rows import Row, Table, generated_table
from skylite.errors import DataError
from skylite.types import Message, Prompt

NAME = "countdown"
REWARD = "countdown"
SYSTEM = (
    "Find an expression with the given value. Use every given number exactly once, with + - * / and "
    "parentheses. Put the expression between <answer> and </answer>."
)
FEW_SHOT: list[Message] = [
    {"role": "user", "content": "Numbers: 4, 9. Value: 13."},
    {"role": "assistant", "content": "4 + 9 = 13\n<answer>4 + 9</answer>"},
    {"role": "user", "content": "Numbers: 2, 3, 7. Value: 20."},
    {"role": "assistant", "content": "7 + 3 = 10, 10 * 2 = 20\n<answer>(7 + 3) * 2</answer>"},
]
DIFFICULTIES = {1: 99, 2: 50, 3: 50, 4: 75, 5: 99}
"""Number of operations -> largest given number."""
DEFAULT = (2, 3)
LARGEST_VALUE = 99
MAX_DRAWS = 20_000
"""Draws without a new problem, after which there are no more."""
ROWS = {"test": 512, "validation": 256, "train": 4096}


def synthetic_rows(split: str, seed: int, difficulty: Sequence[int], limit: int | None) -> Table:
    """Problems, equally many of each difficulty. The splits do not overlap."""
    unknown = sorted(set(difficulty) - set(DIFFICULTIES))
    if unknown:
        raise DataError(f"Countdown has no difficulty {unknown}.", f"Use {list(DIFFICULTIES)}.")
    chosen = sorted(set(difficulty)) or list(DEFAULT)
    each = {name: ceil((limit or n if name == "train" else n) / len(chosen)) for name, n in ROWS.items()}
    start = {"test": 0, "validation": each["test"], "train": each["test"] + each["validation"]}[split]
    columns = [list(islice(problems(steps, seed), start, start + each[split])) for steps in chosen]
    mixed = [row for rows in zip(*columns, strict=True) for row in rows]
    count = limit or ROWS[split] if split == "train" else ROWS[split]
    return generated_table(mixed[:count], "generated", f"countdown (seed {seed}, difficulty {chosen})")


def problems(steps: int, seed: int) -> Iterator[dict[str, Any]]:
    """Distinct problems of one difficulty. The sequence depends on the seed only."""
    rng = random.Random(f"countdown/{seed}/{steps}")
    seen: set[tuple[object, ...]] = set()
    draws = 0
    while draws < MAX_DRAWS:
        draws += 1
        numbers = [rng.randint(1, DIFFICULTIES[steps]) for _ in range(steps + 1)]
        value, expression = _combine(rng, numbers)
        key = (*sorted(numbers), value)
        if 10 <= value <= LARGEST_VALUE and key not in seen:
            draws = 0
            seen.add(key)
            yield {"numbers": numbers, "target": value, "solution": expression, "difficulty": steps}
    raise DataError(f"Countdown has only {len(seen)} problems of difficulty {steps}.", "Lower --limit.")


def _combine(rng: random.Random, numbers: list[int]) -> tuple[int, str]:
    """Combine random pairs until one value is left. Every result is a positive integer."""
    parts = [(number, str(number)) for number in numbers]
    while len(parts) > 1:
        rng.shuffle(parts)
        (a, left), (b, right) = parts.pop(), parts.pop()
        results = {"+": a + b, "*": a * b, "-": a - b, "/": a // b if a % b == 0 else 0}
        operator = rng.choice([name for name, result in results.items() if result > 0])
        parts.append((results[operator], f"({left} {operator} {right})"))
    value, expression = parts[0]
    return value, expression[1:-1]


def to_prompt(row: Row, prompt_id: str) -> Prompt:
    """System text, two worked examples, numbers and value. The reward reads `numbers` and `target`."""
    numbers, target = row.value("numbers"), row.value("target")
    question = f"Numbers: {', '.join(map(str, numbers))}. Value: {target}."
    return Prompt(
        id=prompt_id,
        messages=[{"role": "system", "content": SYSTEM}, *FEW_SHOT, {"role": "user", "content": question}],
        answer=row.text("solution"),
        source=NAME,
        difficulty=row.value("difficulty"),
        extra={"numbers": numbers, "target": target},
    )


def reference(row: Row) -> str:
    """The expression that the problem was made from."""
    return f"<answer>{row.text('solution')}</answer>"
