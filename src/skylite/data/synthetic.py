"""Generated grade-school word problems in GSM8K's format, for machines without a hub and for small models.

A template (synthetic_words.py) is a question and its calculation. `{a}` to `{e}` stand for numbers, `{name}`,
`{friend}`, `{pron}`, `{things}` and `{boxes}` for words, `[x|y]` for a choice. The difficulty is the number
of calculation steps. Each step is one line of the worked answer:

    Leo has 4 marbles. He finds 3 more. How many marbles does Leo have now?
    4 + 3 = <<4+3=7>>7
    #### 7
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import count

from skylite.data.synthetic_words import CONTAINERS, NAMES, TEMPLATES, THINGS

DIFFICULTIES = tuple(TEMPLATES)
_LARGEST = {1: 50, 2: 100, 3: 200, 4: 400}
"""Difficulty -> largest number in a problem."""
_STEP = re.compile(r"(\w+) ([-+*/]) (\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One generated problem."""

    question: str
    answer: str
    """Worked answer with <<...>> annotations; the last line is "#### N"."""
    difficulty: int


def problems(difficulty: int, seed: int) -> Iterator[Problem]:
    """Endless distinct problems of one difficulty. The sequence depends on the seed only."""
    # The seed keeps "stand-in", an old word for synthetic: another text would generate other problems than
    # those of the published results.
    rng = random.Random(f"stand-in/{seed}/{difficulty}")
    seen: set[str] = set()
    for turn in count():
        template, steps = TEMPLATES[difficulty][turn % len(TEMPLATES[difficulty])]
        numbers, lines, result = _calculation(rng, steps, difficulty)
        question = _question(rng, template, numbers)
        if question not in seen:
            seen.add(question)
            yield Problem(
                question=question, answer="\n".join([*lines, f"#### {result}"]), difficulty=difficulty
            )


def _calculation(rng: random.Random, steps: str, difficulty: int) -> tuple[dict[str, int], list[str], int]:
    """Numbers for a template, the worked lines and the result. All results are small positive integers."""
    parsed = [(m[1], m[2], m[3]) for m in _STEP.finditer(steps)]
    while True:
        values = _draw_slots(rng, parsed, _LARGEST[difficulty])
        slots = dict(values)
        lines = []
        for number, (left, operator, right) in enumerate(parsed, start=1):
            result = _apply(_value(values, left), operator, _value(values, right))
            if result is None or not 1 <= result <= _LARGEST[difficulty]:
                break
            lines.append(_line(_value(values, left), operator, _value(values, right), result))
            values[f"r{number}"] = values["r"] = result
        else:
            return slots, lines, values["r"]


def _draw_slots(rng: random.Random, steps: list[tuple[str, str, str]], largest: int) -> dict[str, int]:
    """2 to 20 for sums, 2 to 10 for factors and divisors, 10 to `largest` for dividends and payments."""
    values: dict[str, int] = {}
    for index, (left, operator, right) in enumerate(steps):
        for name in (left, right):
            if not re.fullmatch("[a-e]", name) or name in values:
                continue
            if operator == "*" or (operator == "/" and name == right):
                values[name] = rng.randint(2, 10)
            elif operator == "/" or (operator == "-" and name == left and index):
                values[name] = rng.randint(10, largest)
            else:
                values[name] = rng.randint(2, 20)
    return values


def _value(values: dict[str, int], name: str) -> int:
    return int(name) if name.isdigit() else values[name]


def _apply(left: int, operator: str, right: int) -> int | None:
    """The result, or None when a division leaves a remainder."""
    if operator == "/":
        return left // right if left % right == 0 else None
    return {"+": left + right, "-": left - right, "*": left * right}[operator]


def _line(left: int, operator: str, right: int, result: int) -> str:
    return f"{left} {operator} {right} = <<{left}{operator}{right}={result}>>{result}"


def _question(rng: random.Random, template: str, numbers: dict[str, int]) -> str:
    (name, pronoun), (friend, _) = rng.sample(NAMES, 2)
    text = re.sub(r"\[([^]]*)\]", lambda m: rng.choice(m[1].split("|")), template)
    words = {"name": name, "friend": friend, "pron": pronoun, "Pron": pronoun.capitalize()}
    return text.format(**words, things=rng.choice(THINGS), boxes=rng.choice(CONTAINERS), **numbers)
