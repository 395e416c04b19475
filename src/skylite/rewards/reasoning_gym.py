"""reasoning-gym's scorers, for entries that were stored as JSON."""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache
from typing import Any

from skylite.errors import DataError
from skylite.types import Prompt

_ANSWER = re.compile(r"<answer>((?:(?!<answer>).)*)</answer>", re.DOTALL)
_TUPLE = "!tuple"
_PAIRS = "!pairs"
_UNREADABLE = (
    ArithmeticError,
    AttributeError,
    LookupError,
    RecursionError,
    SyntaxError,
    TypeError,
    ValueError,
)


def reasoning_gym_reward(prompt: Prompt, completion: str) -> float:
    """The task's score for the text in the last <answer>...</answer>; 0.0 without one.

    Some scorers raise for an answer that they cannot parse. Such an answer scores 0.0, but only if the
    scorer still gives the reference answer 1.0. Otherwise the completion is not to blame, and the exception
    is raised.
    """
    answers = _ANSWER.findall(completion)
    if not answers:
        return 0.0
    scorer, entry = _scorer(prompt.extra["task"]), from_json(prompt.extra["entry"])
    try:
        return float(scorer(answers[-1].strip(), entry))
    except _UNREADABLE:
        if float(scorer(prompt.answer, from_json(prompt.extra["entry"]))) != 1.0:
            raise
        return 0.0


def to_json(value: Any) -> Any:
    """Convert to JSON, with tags for tuples and dicts with non-string keys, which some scorers need."""
    if isinstance(value, tuple):
        return {_TUPLE: [to_json(v) for v in value]}
    if isinstance(value, list):
        return [to_json(v) for v in value]
    if isinstance(value, dict):
        if all(isinstance(k, str) for k in value):
            return {k: to_json(v) for k, v in value.items()}
        return {_PAIRS: [[to_json(k), to_json(v)] for k, v in value.items()]}
    return value


def from_json(value: Any) -> Any:
    """The inverse of `to_json`."""
    if isinstance(value, list):
        return [from_json(v) for v in value]
    if isinstance(value, dict):
        if value.keys() == {_TUPLE}:
            return tuple(from_json(v) for v in value[_TUPLE])
        if value.keys() == {_PAIRS}:
            return {from_json(k): from_json(v) for k, v in value[_PAIRS]}
        return {k: from_json(v) for k, v in value.items()}
    return value


@cache
def _scorer(task: str) -> Callable[[str, dict[str, Any]], float]:
    try:
        import reasoning_gym
    except ImportError:
        raise DataError(
            "The package reasoning-gym is not installed.", 'Install it: pip install "skylite[reasoning-gym]".'
        ) from None
    scorer: Callable[[str, dict[str, Any]], float] = reasoning_gym.get_score_answer_fn(task)
    return scorer
