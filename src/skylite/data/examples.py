"""Prompts on their way into parquet: each with a completion that must score 1.0 and its place in the source."""

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
Track = Callable[[Sequence[_T], str], Iterable[_T]]
"""Passes items through and shows how far it is: (items, what is done to them)."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt that is not checked yet."""

    prompt: Prompt
    reference: str
    """A perfect completion."""
    where: str
    """"train.jsonl line 17"."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSet:
    """A data set that is not checked yet."""

    dataset: str
    reward: str
    system: str
    examples: list[Message]
    splits: dict[str, list[Example]]
    tables: dict[str, Table]
    """Where each split's rows come from."""
    notes: list[str]
    """Choices made, as they were said aloud."""


def check_examples(examples: Sequence[Example], spec: str, reward: RewardFn) -> list[Prompt]:
    """The prompts of the examples. Raises DataError for the first one whose reference does not score 1.0."""
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
                f"{example.where}: its reference answer scores {value:g} instead of 1.0 under the reward {spec}, "
                f"which was given {_shorten(example.reference)!r}.",
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
