"""reasoning-gym's own scorers, on entries that travelled through JSON."""

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
    """The task's own score of the text in the last <answer>...</answer>; 0.0 without one.

    Some scorers raise on an answer they cannot read. That is a 0.0 only if the same scorer still gives the reference 1.0;
    otherwise the fault is not the completion's and the exception stands.
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
    """Tuples and dicts with keys other than text, tagged so that `from_json` gives back an equal value: some scorers need them."""
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
