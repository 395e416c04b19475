"""Guess a number: the data of the environment `guess`, which gives the rewards.

The difficulty is the number of guesses that a perfect player needs at most: 3 for 7 numbers, 4 for 15.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from skylite.data.raw_rows import Row, Table, generated_table
from skylite.errors import DataError
from skylite.types import Message, Prompt

NAME = "guess"
REWARD = "exact_match"
SYSTEM = "Guess the number. Answer with a number only."
FEW_SHOT: list[Message] = [
    {"role": "user", "content": "I think of a number from 1 to 7."},
    {"role": "assistant", "content": "4"},
    {"role": "user", "content": "higher"},
    {"role": "assistant", "content": "6"},
    {"role": "user", "content": "lower"},
    {"role": "assistant", "content": "5"},
]
DIFFICULTIES = (2, 3, 4)
DEFAULT = (4,)
STARTS = 30
"""The smallest number of a range is 1 to STARTS."""
ROWS = {"test": 256, "validation": 128, "train": 1024}


def load_rows(split: str, source: Path | None) -> Table:
    """The game is generated only."""
    raise DataError("guess has no released rows.", "Run `skylite prepare guess --synthetic`.")


def synthetic_rows(split: str, seed: int, difficulty: Sequence[int], limit: int | None) -> Table:
    """Games, equally many of each difficulty. Splits may share games: each is played anew."""
    unknown = sorted(set(difficulty) - set(DIFFICULTIES))
    if unknown:
        raise DataError(f"guess has no difficulty {unknown}.", f"Use {list(DIFFICULTIES)}.")
    chosen = sorted(set(difficulty)) or list(DEFAULT)
    rng = random.Random(f"guess/{seed}/{split}")
    count = limit or ROWS[split] if split == "train" else ROWS[split]
    rows = []
    for number in range(count):
        guesses = chosen[number % len(chosen)]
        low = rng.randint(1, STARTS)
        high = low + 2**guesses - 2
        rows.append({"low": low, "high": high, "secret": rng.randint(low, high), "difficulty": guesses})
    return generated_table(rows, "generated", f"guess (seed {seed}, difficulty {chosen})")


def to_prompt(row: Row, prompt_id: str) -> Prompt:
    """System text, one game as example, and the first message of a new game."""
    low, high = int(row.text("low")), int(row.text("high"))
    question: Message = {"role": "user", "content": f"I think of a number from {low} to {high}."}
    return Prompt(
        id=prompt_id,
        messages=[{"role": "system", "content": SYSTEM}, *FEW_SHOT, question],
        answer=row.text("secret"),
        source=NAME,
        difficulty=int(row.text("difficulty")),
        extra={"low": low, "high": high},
    )


def reference(row: Row) -> str:
    """A lucky first guess."""
    return row.text("secret")
