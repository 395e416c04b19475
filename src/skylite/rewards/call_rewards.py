"""Calls reward functions: one completion or a batch, sync or async. Checks that they return numbers."""

from __future__ import annotations

import asyncio
import atexit
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

from skylite.errors import RunFailed, non_finite_reward
from skylite.rewards.reward_arguments import Item, Signature, SignatureProblem, read_signature
from skylite.types import is_number
from skylite.user_functions import UserCodeFailed, user_code

READS_MESSAGES = (
    "TypeError: string indices must be integers",
    "AttributeError: 'str' object has no attribute 'get'",
    "IndexError: string index out of range",
)
"""How Python refuses to read text, in the last case an empty one, as chat messages."""


class _CallFailed(Exception):
    """An async call raised."""


@dataclass(frozen=True, slots=True)
class RewardFunction:
    """A reward function and what it asks for."""

    function: Callable[..., Any]
    signature: Signature
    is_async: bool

    @property
    def takes_several(self) -> bool:
        """Whether it works on several completions at once."""
        return self.signature.is_batch or self.is_async


def reward_function(function: Callable[..., Any]) -> RewardFunction:
    """Read what a function asks for. Raises SignatureProblem."""
    call = getattr(function, "__call__", None)  # noqa: B004 of an object with an async __call__
    is_async = inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(call)
    return RewardFunction(function, read_signature(function), is_async)


def score(name: str, reward: RewardFunction, items: Sequence[Item]) -> list[float]:
    """The rewards of completions. They may be NaN or infinite: trainer/anomaly.py handles such a step.

    Raises RunFailed with the prompt's id if the function raises (SystemExit too), returns something else than
    a number for each completion, or asks for a column that the data does not have.
    """
    if not items:
        return []
    calls = check_columns(name, reward, items)
    if reward.signature.is_batch:
        return _score_batch(name, reward, items, calls[0])
    if reward.is_async:
        values = _await_all(name, reward, items, calls)
        return [_number(name, item, value) for item, value in zip(items, values, strict=True)]
    return [_score_one(name, reward, item, call) for item, call in zip(items, calls, strict=True)]


def check_columns(name: str, reward: RewardFunction, items: Sequence[Item]) -> list[dict[str, Any]]:
    """The arguments of each call: one for each item, or a single one for a batch.

    Raises RunFailed with the prompt's id if the function asks for a column that the data does not have.
    """
    signature = reward.signature
    try:
        if signature.is_batch:
            return [signature.batch_arguments(items)]
        return [signature.arguments(prompt, completion) for prompt, completion in items]
    except SignatureProblem as error:
        raise RunFailed(
            f"The reward function {name} cannot be called: {error}.",
            "Rename the parameter, give it a default, or prepare the data with that column.",
        ) from None


def finite_scores(name: str, reward: RewardFunction, items: Sequence[Item]) -> list[float]:
    """Like `score`, but raises RunFailed for NaN and infinity, too."""
    values = score(name, reward, items)
    for value, (prompt, completion) in zip(values, items, strict=True):
        if not is_number(value):
            raise non_finite_reward(name, repr(value), prompt.id, completion)
    return values


def _score_one(name: str, reward: RewardFunction, item: Item, arguments: dict[str, Any]) -> float:
    with _blaming(name, item, signature=reward.signature):
        value = reward.function(**arguments)
    return _number(name, item, value)


def _await_all(
    name: str, reward: RewardFunction, items: Sequence[Item], calls: Sequence[dict[str, Any]]
) -> list[Any]:
    """The values of all calls, which run at once. The first failure cancels the others."""
    failed: list[tuple[Item, BaseException]] = []

    async def call(item: Item, arguments: dict[str, Any]) -> Any:
        try:
            return await reward.function(**arguments)
        except BaseException as error:
            if failed and isinstance(error, asyncio.CancelledError):
                raise
            failed.append((item, error))
            # SystemExit itself would leave the event loop at once, with the other calls unfinished in it.
            raise _CallFailed from None

    async def call_all() -> list[Any]:
        tasks = [asyncio.ensure_future(call(*pair)) for pair in zip(items, calls, strict=True)]
        try:
            return await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    try:
        with user_code():
            try:
                return _event_loop().run(call_all())
            except _CallFailed:
                raise failed[0][1] from None
    except UserCodeFailed as error:
        item = failed[0][0] if failed else items[0]
        raise _raised(name, error, item, 1, reward.signature) from error.__cause__


def _score_batch(
    name: str, reward: RewardFunction, items: Sequence[Item], arguments: dict[str, Any]
) -> list[float]:
    with _blaming(name, items[0], len(items), reward.signature):
        values = reward.function(**arguments)
        if reward.is_async:
            values = _event_loop().run(values)
        is_list = hasattr(values, "__iter__") and not isinstance(values, str | bytes | Mapping)
        rewards = list(values) if is_list else []
        returned = f"{len(rewards)} rewards" if is_list else repr(values)[:200]
    if len(rewards) != len(items):
        raise RunFailed(
            f"The reward function {name} returned {returned} for a batch of {len(items)} "
            f"(first prompt {items[0][0].id}).",
            "Return a list with one number for each of completions.",
        )
    return [_number(name, item, value) for item, value in zip(items, rewards, strict=True)]


def _number(name: str, item: Item, value: object) -> float:
    """What a function returned, as a float; numpy's and torch's numbers too. Raises RunFailed."""
    with _blaming(name, item):
        is_one = hasattr(type(value), "__float__")
        number = _to_float(value) if is_one else 0.0
        shown = "" if is_one else repr(value)[:200]
    if not is_one:
        error = non_finite_reward(name, shown, item[0].id, item[1])
        error.hint = {
            "dict": "Return a number, not verl's dict: its 'score'.",
            "NoneType": 'Return a number; TRL\'s None for "does not apply" is not supported.',
        }.get(type(value).__name__, error.hint)
        raise error
    return number


def _to_float(value: Any) -> float:
    try:
        return float(value)
    except OverflowError:  # an int too large for a float
        return float("inf") if value > 0 else float("-inf")


@contextmanager
def _blaming(
    name: str, item: Item, batch_size: int = 1, signature: Signature | None = None
) -> Iterator[None]:
    """Turn whatever the function raises into RunFailed with the prompt's id."""
    try:
        with user_code():
            yield
    except UserCodeFailed as error:
        raise _raised(name, error, item, batch_size, signature) from error.__cause__


def _raised(
    name: str, error: UserCodeFailed, item: Item, batch_size: int, signature: Signature | None
) -> RunFailed:
    prompt, completion = item
    batch = f"a batch of {batch_size}, the first is " if batch_size > 1 else ""
    return RunFailed(
        f"The reward function {name} raised {error} "
        f"({batch}prompt {prompt.id}, completion {completion[:80]!r}).",
        _chat_remedy(error, signature) or "A reward must return a number for every completion; correct it.",
    )


def _chat_remedy(error: UserCodeFailed, signature: Signature | None) -> str:
    """What to do if the function reads chat messages, as TRL's do, and got text; empty if it does not."""
    if signature is None or signature.wants_messages or not str(error).startswith(READS_MESSAGES):
        return ""
    annotation = "list[list[dict[str, str]]]" if signature.is_batch else "list[dict[str, str]]"
    name = "completions" if signature.is_batch else "completion"
    return (
        "skylite passes each completion as text, which can be empty. If the function reads chat messages, as "
        f'completion[0]["content"] does, annotate it: {name}: {annotation} (docs/how-to/own-reward.md).'
    )


@cache
def _event_loop() -> asyncio.Runner:
    """One event loop for the process, so that a function may keep its HTTP client between calls."""
    runner = asyncio.Runner()
    atexit.register(runner.close)
    return runner
