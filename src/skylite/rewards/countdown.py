"""Countdown: an expression that uses each of the given numbers once and has the target as its value.

The expression is parsed here; nothing is evaluated as code.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable
from fractions import Fraction

from skylite.errors import DataError

MAX_LENGTH = 200
"""Longest expression in characters, which also limits how deep its parentheses go."""
_TOKEN = re.compile(r"\s*(?:(\d{1,9})|([-+*/()]))")
_OPERATIONS: dict[str, Callable[[Fraction, Fraction], Fraction]] = {
    "+": lambda a, b: a + b,
    "-": lambda a, b: a - b,
    "*": lambda a, b: a * b,
    "/": lambda a, b: a / b,
}


def countdown(completion: str, *, numbers: list[int], target: int) -> float:
    """1.0 if the last <answer>...</answer> holds a right expression, else 0.0.

    Raises DataError if the data's columns `numbers` and `target` do not hold integers.
    """
    if type(target) is not int or not isinstance(numbers, list) or not all(type(n) is int for n in numbers):
        raise DataError(
            "The columns 'numbers' and 'target' do not hold integers: "
            f"{str(numbers)[:80]} and {str(target)[:80]}.",
            "The reward countdown needs a list of integers and an integer.",
        )
    answer = _last_answer(completion)
    if answer is None:
        return 0.0
    try:
        value, used = evaluate(answer)
    except (ValueError, ZeroDivisionError):
        return 0.0
    return float(value == target and Counter(used) == Counter(numbers))


def _last_answer(text: str) -> str | None:
    """In time that grows with the text only: a regex would search the end again for each beginning."""
    begin, end = "<answer>", "</answer>"
    answer, start = None, text.find(begin)
    while start >= 0 and (close := text.find(end, start + len(begin))) >= 0:
        answer, start = text[start + len(begin) : close], text.find(begin, close + len(end))
    return answer


def evaluate(expression: str) -> tuple[Fraction, list[int]]:
    """The exact value of integers with + - * / and parentheses, and the integers in it.

    Raises ValueError for any other text, and ZeroDivisionError.
    """
    tokens = _tokens(expression)
    used: list[int] = []
    position = 0

    def peek() -> str | int | None:
        return tokens[position] if position < len(tokens) else None

    def take() -> str | int:
        nonlocal position
        if position == len(tokens):
            raise ValueError("it ends too early")
        position += 1
        return tokens[position - 1]

    def atom() -> Fraction:
        token = take()
        if isinstance(token, int):
            used.append(token)
            return Fraction(token)
        if token != "(":
            raise ValueError(f"{token!r} is not a number")
        value = chain(0)
        if take() != ")":
            raise ValueError("a parenthesis is not closed")
        return value

    def chain(level: int) -> Fraction:
        operators = ("+-", "*/")[level]
        value = atom() if level else chain(1)
        while (operator := peek()) is not None and str(operator) in operators:
            take()
            value = _OPERATIONS[str(operator)](value, atom() if level else chain(1))
        return value

    value = chain(0)
    if position != len(tokens):
        raise ValueError(f"{tokens[position]!r} does not belong there")
    return value, used


def _tokens(expression: str) -> list[str | int]:
    text = expression.strip()
    if len(text) > MAX_LENGTH or not text.isascii():
        raise ValueError("it is too long or has other characters")
    tokens: list[str | int] = []
    position = 0
    while position < len(text):
        found = _TOKEN.match(text, position)
        if found is None:
            raise ValueError(f"{text[position]!r} is not part of an expression")
        tokens.append(int(found[1]) if found[1] else found[2])
        position = found.end()
    return tokens
