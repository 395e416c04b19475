"""Examples: prompts with a reference completion. `check_examples` turns them into prompts for training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from skylite.data.prompts import Split
from skylite.data.sources import Table
from skylite.errors import DataError, RunFailed
from skylite.rewards import RewardFn, finite_score
from skylite.types import Message, Prompt

SPLITS: tuple[Split, ...] = ("train", "validation", "test")
_T = TypeVar("_T")
ShowProgress = Callable[[Sequence[_T], str], Iterable[_T]]
"""(items, description) -> the same items, with a progress bar while they are consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt before its check."""

    prompt: Prompt
    reference: str
    """A completion that must score 1.0."""
    where: str
    """The row in its source, e.g. "train.jsonl line 17", for error messages."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSet:
    """The examples of a data set before their check."""

    dataset: str
    reward: str
    """Reward spec: gsm8k, math, format, reasoning-gym or FILE.py:function."""
    system: str
    few_shot: list[Message]
    """Worked examples in every prompt: alternating user and assistant turns."""
    splits: dict[str, list[Example]]
    tables: dict[str, Table]
    """The raw rows of each split."""
    notes: list[str]
    """Choices to log and to record in the parquet footers, such as the source."""


def check_examples(examples: Sequence[Example], spec: str, reward: RewardFn) -> list[Prompt]:
    """The prompts of the examples. Raises DataError for the first reference that does not score 1.0."""
    for example in examples:
        try:
            value = finite_score(spec, reward, example.prompt, example.reference)
        except RunFailed as error:
            cause = error.__cause__
            reason = cause.what if isinstance(cause, DataError) else error.what
            raise DataError(
                f"{example.where}: {reason}", "Correct or delete the row; nothing was written."
            ) from error
        if value != 1.0:
            raise DataError(
                f"{example.where}: the reference answer {_shorten(example.reference)!r} scores {value:g} "
                f"under the reward {spec}; it must score 1.0.",
                "Correct or delete the row, or choose another reward; nothing was written.",
            )
    return [example.prompt for example in examples]


def sample_rows(table: Table, limit: int | None, seed: int) -> Table:
    """At most `limit` rows, chosen by the seed, in file order."""
    if limit is None or limit >= len(table.rows):
        return table
    chosen = sorted(random.Random(f"limit/{seed}").sample(range(len(table.rows)), limit))
    return replace(table, rows=[table.rows[i] for i in chosen])


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"...{text[-80:]}"
