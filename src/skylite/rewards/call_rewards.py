"""Calls reward functions: one completion or a batch, sync or async. Checks that they return numbers.

Everything is passed by name, as the function's parameters ask for it. A function with `completions` or
`prompts` takes a batch: lists with one element for each completion. Any other takes one completion.
"""

from __future__ import annotations

import asyncio
import atexit
import copy
import inspect
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any, ForwardRef, get_args, get_origin

from skylite.errors import RunFailed, non_finite_reward
from skylite.types import Prompt, is_number
from skylite.user_functions import UserCodeFailed, split_feedback, user_code

Item = tuple[Prompt, str]
"""A prompt and the text of one completion."""
Returned = tuple[dict[str, float], str]
"""The numbers that a function returned for a completion, by name, and its feedback."""
BATCH_NAMES = {"prompt": "prompts", "completion": "completions"}
"""Names that differ in a batch; every other name stays, and its value becomes a list."""
VERL_NAMES = ("data_source", "solution_str", "ground_truth", "extra_info")
"""The arguments of verl's compute_score, for functions that name them."""

ANSWER_NAMES = ("answer", "ground_truth")
"""Names of the reference answer: skylite's and verl's."""
READS_MESSAGES = (
    "TypeError: string indices must be integers",
    "AttributeError: 'str' object has no attribute 'get'",
    "IndexError: string index out of range",
)
"""How Python refuses to read text, in the last case an empty one, as chat messages."""


class SignatureProblem(Exception):
    """Why a function cannot be called. The text continues "it cannot be called: "."""


@dataclass(frozen=True, slots=True)
class Signature:
    """The arguments that a reward function takes."""

    named: frozenset[str]
    required: frozenset[str]
    takes_rest: bool
    """Whether it has **columns, which gets what the function does not name."""
    is_batch: bool
    wants_messages: bool
    """Whether a completion is passed as chat messages, as TRL does for chat data, instead of text."""

    @property
    def asks_for_answer(self) -> bool:
        """Whether the function names the reference answer."""
        return bool(self.named & set(ANSWER_NAMES))

    def arguments(self, prompt: Prompt, completion: str) -> dict[str, Any]:
        """The arguments of a call for one completion. Raises SignatureProblem if the data lacks a column."""
        values = _values(prompt, completion, self.wants_messages)
        if self.is_batch:
            values = {BATCH_NAMES.get(name, name): value for name, value in values.items()}
        missing = sorted(self.required - values.keys())
        if missing:
            available = sorted(values.keys() - set(VERL_NAMES))
            raise SignatureProblem(
                f"it asks for {' and '.join(missing)}, but prompt {prompt.id} has only {', '.join(available)}"
            )
        unnamed = values.keys() - set(VERL_NAMES) if self.takes_rest else set()
        return {name: value for name, value in values.items() if name in self.named | unnamed}

    def batch_arguments(self, items: Sequence[Item]) -> dict[str, list[Any]]:
        """The arguments of a call for a batch: lists, with None where a row lacks an optional column.

        Raises SignatureProblem if a row lacks a column that the function requires.
        """
        rows = [self.arguments(prompt, completion) for prompt, completion in items]
        names = dict.fromkeys(name for row in rows for name in row)
        return {name: [row.get(name) for row in rows] for name in names}


def read_signature(function: Callable[..., Any]) -> Signature:
    """Read what a reward function takes. Raises SignatureProblem, and whatever its annotations raise."""
    parameters = inspect.signature(function).parameters.values()
    for p in parameters:
        if p.kind is p.POSITIONAL_ONLY and p.default is p.empty:
            raise SignatureProblem(f"{p.name} is positional-only, and arguments are passed by name")
    by_name = [p for p in parameters if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    named = frozenset(p.name for p in by_name)
    takes_rest = any(p.kind is p.VAR_KEYWORD for p in parameters)
    batch, single = named & set(BATCH_NAMES.values()), named & {*BATCH_NAMES, "solution_str"}
    if batch and single:
        raise SignatureProblem(
            f"{', '.join(sorted(batch))} is for a batch and {', '.join(sorted(single))} for one completion"
        )
    completion = {"completions"} if batch else {"completion", "solution_str"}
    if not named & completion and not takes_rest:
        raise SignatureProblem(f"it takes ({', '.join(p.name for p in parameters)}) and no completion")
    return Signature(
        named=named,
        required=frozenset(p.name for p in by_name if p.default is p.empty),
        takes_rest=takes_rest,
        is_batch=bool(batch),
        wants_messages=any(_is_annotated_as_messages(function, name) for name in named & completion),
    )


def _values(prompt: Prompt, completion: str, wants_messages: bool) -> dict[str, Any]:
    """Everything a function can ask for. Copies: a function may change what it gets."""
    extra = copy.deepcopy(prompt.extra)
    said = [{"role": "assistant", "content": completion}] if wants_messages else completion
    answer = dict.fromkeys(ANSWER_NAMES, prompt.answer) if prompt.answer else {}
    return {
        "id": prompt.id,
        "source": prompt.source,
        "difficulty": prompt.difficulty,
        "data_source": prompt.source,
        "extra_info": extra,
        "solution_str": completion,
        **extra,
        **answer,
        "prompt": [dict(message) for message in prompt.messages],
        "completion": said,
    }


def _is_annotated_as_messages(function: Callable[..., Any], name: str) -> bool:
    """Whether the parameter's annotation holds a dict, as `list[dict[str, str]]` does."""
    if inspect.signature(function).parameters[name].annotation is inspect.Parameter.empty:
        return False
    try:
        annotation = inspect.signature(function, eval_str=True).parameters[name].annotation
    except Exception as error:
        raise SignatureProblem(f"its annotations cannot be evaluated ({error})") from error
    return _holds_mapping(annotation)


def _holds_mapping(annotation: Any) -> bool:
    if isinstance(annotation, str | ForwardRef):
        raise SignatureProblem(f"the annotation {annotation!r} is quoted inside another annotation")
    kind = get_origin(annotation) or annotation
    if isinstance(kind, type) and issubclass(kind, Mapping):
        return True
    return any(_holds_mapping(part) for part in get_args(annotation))


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
    """The rewards of completions; of named numbers the first. As for `named_scores`."""
    return [next(iter(values.values())) for values, _ in named_scores(name, reward, items)]


def named_scores(name: str, reward: RewardFunction, items: Sequence[Item]) -> list[Returned]:
    """What completions earned: a number under the function's name, or the named numbers that it returned.

    They may be NaN or infinite: trainer/anomaly.py handles such a step. Raises RunFailed with the prompt's id
    if the function raises (SystemExit too), returns something else than a number or named numbers for each
    completion, or a feedback that is no text, or asks for a column that the data does not have.
    """
    if not items:
        return []
    calls = check_columns(name, reward, items)
    if reward.signature.is_batch:
        return _score_batch(name, reward, items, calls[0])
    if reward.is_async:
        values = _await_all(name, reward, items, calls)
        return [_named(name, item, value) for item, value in zip(items, values, strict=True)]
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


def _score_one(name: str, reward: RewardFunction, item: Item, arguments: dict[str, Any]) -> Returned:
    with _blaming(name, item, signature=reward.signature):
        value = reward.function(**arguments)
    return _named(name, item, value)


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
) -> list[Returned]:
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
    return [_named(name, item, value) for item, value in zip(items, rewards, strict=True)]


def _named(name: str, item: Item, value: object) -> Returned:
    """A number under the function's name, or the function's own names. Raises RunFailed."""
    if not isinstance(value, dict):
        return {name: _number(name, item, value)}, ""
    if "score" in value:
        raise RunFailed(
            f"The reward function {name} returned a dict with 'score' for prompt {item[0].id}: verl takes "
            "that as the reward, and skylite would add the others to it.",
            "Return the number alone; or rename 'score', and let names that are only shown begin with "
            "metric/.",
        )
    try:
        numbers, feedback = split_feedback(value)
    except ValueError as error:
        raise RunFailed(
            f"The reward function {name} {error} (prompt {item[0].id}).",
            "Return an empty text where there is nothing to say.",
        ) from None
    if not numbers or not all(isinstance(key, str) for key in numbers):
        raise non_finite_reward(name, repr(value)[:200], item[0].id, item[1])
    return {key: _number(f"{name} ({key})", item, number) for key, number in numbers.items()}, feedback


def _number(name: str, item: Item, value: object) -> float:
    """What a function returned, as a float; numpy's and torch's numbers too. Raises RunFailed."""
    with _blaming(name, item):
        is_one = hasattr(type(value), "__float__")
        number = _to_float(value) if is_one else 0.0
        shown = "" if is_one else repr(value)[:200]
    if not is_one:
        error = non_finite_reward(name, shown, item[0].id, item[1])
        error.hint = {
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
