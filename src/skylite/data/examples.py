"""Examples: prompts with a reference completion. `check_examples` turns them into prompts for training."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import TypeVar

from skylite.config.rollout import RewardParameters
from skylite.data.prompts import Chat, Kind, Pair, PreparedRow
from skylite.data.raw_rows import Table
from skylite.errors import DataError, RunFailed
from skylite.notes import Note
from skylite.rewards.built_in import DEFAULTS
from skylite.rewards.call_rewards import RewardFunction, check_columns, finite_scores
from skylite.rewards.right_completion import RightForm
from skylite.types import Message, Prompt

_T = TypeVar("_T")
_HINT = "Correct or delete the row; nothing was written."
ShowProgress = Callable[[Sequence[_T], str], Iterable[_T]]
"""(items, description) -> the same items, with a progress bar while they are consumed."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Example:
    """A prompt before its check."""

    prompt: Prompt
    reference: str | None
    """A right completion, or the reply to learn; None: none is known, or the data has no answers."""
    where: str
    """The row in its source, e.g. "train.jsonl line 17", for error messages."""
    rejected: str | None = None
    """Of pairs only: the worse reply."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ExampleSet:
    """The examples of a data set before their check."""

    dataset: str
    reward: str
    """A built-in reward (rewards/built_in.py) or FILE.py:function; empty for --sft and --pairs."""
    system: str
    few_shot: list[Message]
    """Worked examples in every prompt: alternating user and assistant turns."""
    splits: dict[str, list[Example]]
    tables: dict[str, Table]
    """The raw rows of each split."""
    notes: Sequence[Note | str]
    """Choices to log and to record in the parquet footers, such as the source."""
    parameters: RewardParameters = DEFAULTS
    """Settings of a built-in reward."""
    has_answers: bool = True
    form: RightForm | None = None
    """What the user's own function gives a right completion; None: 1.0, as the built-in rewards do."""
    drop_failing: bool = False
    """Leave out examples whose reference does not score as it must, instead of raising DataError."""
    kind: Kind = "prompts"


def prepared_row(examples: ExampleSet, example: Example) -> PreparedRow:
    """The row of the file. Raises DataError for a chat to learn without a reply."""
    prompt, reply = example.prompt, example.reference
    if examples.kind == "prompts":
        return prompt
    if reply is None:
        raise DataError(f"{example.where} has no reply to learn.", "Use --sft with data that has answers.")
    if examples.kind == "pairs":
        assert example.rejected is not None, "a pair has both"
        return Pair(id=prompt.id, messages=prompt.messages, chosen=reply, rejected=example.rejected)
    turns = [turn for turn in prompt.messages if turn not in examples.few_shot]  # to learn, not to show
    return Chat(id=prompt.id, messages=[*turns, {"role": "assistant", "content": reply}])


def check_examples(
    examples: Sequence[Example], spec: str, reward: RewardFunction, form: RightForm | None = None
) -> list[Prompt]:
    """The prompts of the examples. Raises DataError for the first reference that does not score as it must:
    1.0, or as `form` says.

    Of an example without a reference, checks that it has the columns that the reward asks for.
    """
    for part in [examples] if reward.takes_several else [[example] for example in examples]:
        items = [(e.prompt, e.reference) for e in part if e.reference is not None]
        try:
            check_columns(spec, reward, [(e.prompt, "") for e in part])
            values = finite_scores(spec, reward, items)
        except RunFailed as error:
            cause = error.__cause__
            reason, hint = error.what, f"{error.hint} If the row is wrong: {_HINT[0].lower()}{_HINT[1:]}"
            if isinstance(cause, DataError):
                reason, hint = cause.what, _HINT
            where = part[0].where if len(part) == 1 else f"{part[0].where} to {part[-1].where}"
            raise DataError(f"{where}: {reason}", hint) from error
        with_reference = [e for e in part if e.reference is not None]
        for example, value in zip(with_reference, values, strict=True):
            _require_right(example, spec, value, form)
    return [example.prompt for example in examples]


def _require_right(example: Example, spec: str, value: float, form: RightForm | None) -> None:
    answer = _shorten(example.reference or "")
    if form is None and value != 1.0:
        raise DataError(
            f"{example.where}: the reference answer {answer!r} scores {value:g} under the reward {spec}; "
            "it must score 1.0.",
            "Correct the row, choose another reward, leave such rows out with --drop-failing, or the answers "
            "with --no-answer; nothing was written.",
        )
    if form is not None and not form.accepts(value):
        raise DataError(
            f"{example.where}: the reference answer {answer!r} scores {value:g} under the reward {spec}; "
            f"those of most other rows score {form.wanted()}.",
            f"Correct the row, or leave such rows out with --drop-failing. If {value:g} is fine: "
            f"--best-reward {value:g}. Nothing was written.",
        )


def check_or_drop(
    examples: Sequence[Example],
    spec: str,
    reward: RewardFunction,
    dropped: list[str],
    form: RightForm | None = None,
) -> list[Prompt]:
    """Like `check_examples`, but leaves failing examples out; `dropped` gets what is wrong with them."""
    try:
        return check_examples(examples, spec, reward, form)
    except DataError as error:
        if len(examples) == 1:
            dropped.append(error.what)
            return []
    return [p for example in examples for p in check_or_drop([example], spec, reward, dropped, form)]


def check_ids(examples: ExampleSet) -> None:
    """Raise DataError if two examples have the same id."""
    seen: dict[str, str] = {}
    for example in (example for split in examples.splits.values() for example in split):
        if (first := seen.setdefault(example.prompt.id, example.where)) != example.where:
            raise DataError(
                f"{first} and {example.where} have the same id {example.prompt.id!r}.",
                "Correct to_prompt: it gets an id to use.",
            )


def sample_rows(table: Table, limit: int | None, seed: int) -> Table:
    """At most `limit` rows, chosen by the seed, in file order."""
    if limit is None or limit >= len(table.rows):
        return table
    chosen = sorted(random.Random(f"limit/{seed}").sample(range(len(table.rows)), limit))
    return replace(table, rows=[table.rows[i] for i in chosen])


def _shorten(text: str) -> str:
    return text if len(text) <= 80 else f"...{text[-80:]}"
