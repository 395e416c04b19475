"""The built-in rewards that settings describe: exact_match, format, regex, length."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import regex

from skylite.errors import ConfigError
from skylite.rewards.gsm8k import has_final_number, parse_number

MATCH_TIMEOUT_S = 5.0
"""Limit for one pattern on one completion. Some patterns take exponential time."""
Compare = Literal["text", "number", "math"]


@dataclass(frozen=True, slots=True)
class ExactMatch:
    """1.0 if the completion's answer equals the reference answer, else 0.0."""

    answer_pattern: str | None = None
    """None: the full completion is the answer."""
    compare: Compare = "text"
    ignore_case: bool = False

    def __call__(self, completion: str, *, answer: str) -> float:
        found = self._answer(completion)
        return float(found is not None and self._equals(found.strip(), answer.strip()))

    def vote(self, completion: str) -> str | None:
        """The completion's answer, the same text for equal answers; formulas count as their text."""
        found = self._answer(completion)
        if found is None or self.compare == "math":
            return found and "".join(found.split())
        if self.compare == "number":
            number = parse_number(found.strip())
            return None if number is None else str(number)
        return self._text(found)

    def _answer(self, completion: str) -> str | None:
        return completion if self.answer_pattern is None else find_answer(self.answer_pattern, completion)

    def _text(self, answer: str) -> str:
        text = " ".join(answer.split())
        return text.casefold() if self.ignore_case else text

    def _equals(self, found: str, answer: str) -> bool:
        if self.compare == "number":
            number = parse_number(found)
            return number is not None and number == parse_number(answer)
        if self.compare == "math":
            from skylite.rewards.math import math

            return math(f"\\boxed{{{found}}}", answer=answer) == 1.0
        return self._text(found) == self._text(answer)


def format_reward(answer_pattern: str | None) -> Callable[[str], float]:
    """A function: 1.0 if the completion has an answer, right or wrong, else 0.0."""
    if answer_pattern is None:
        return has_final_number
    return lambda completion: float(find_answer(answer_pattern, completion) is not None)


def regex_reward(pattern: str | None) -> Callable[[str], float]:
    """A function: 1.0 if the pattern matches anywhere in the completion. Raises ConfigError without one."""
    if pattern is None:
        raise ConfigError(
            "The reward regex needs reward.pattern.", "E.g. --set 'reward.pattern=\"(?s)<think>.*</think>\"'."
        )
    compiled = regex.compile(pattern)

    def matches(completion: str) -> float:
        try:
            return float(compiled.search(completion, timeout=MATCH_TIMEOUT_S) is not None)
        except TimeoutError:
            return 0.0

    return matches


def length_reward(min_length: int, max_length: int | None) -> Callable[[str], float]:
    """A function: 1.0 between the limits, in characters without surrounding white space.

    Below, the share of `min_length`; above, falling to 0.0 at twice `max_length`. Raises ConfigError if there
    is no limit.
    """
    if not min_length and max_length is None:
        raise ConfigError(
            "The reward length needs reward.min_length or reward.max_length.",
            "E.g. --set reward.max_length=400.",
        )

    def fits(completion: str) -> float:
        length = len(completion.strip())
        if length < min_length:
            return length / min_length
        if max_length is not None and length > max_length:
            return max(0.0, 2 - length / max_length)
        return 1.0

    return fits


def find_answer(pattern: str, text: str) -> str | None:
    """The last group of the pattern's last match; the full match if it has no group.

    Of groups that are alternatives, the last one that matched. None without a match, and after
    MATCH_TIMEOUT_S.
    """
    try:
        last = deque(regex.compile(pattern).finditer(text, timeout=MATCH_TIMEOUT_S), maxlen=1)
    except TimeoutError:
        return None
    if not last:
        return None
    groups = last[0].groups() or (last[0][0],)
    return next((group for group in reversed(groups) if group is not None), None)
