"""Difficulty-school word problems in GSM8K's format, generated: for machines without a hub and models too small for GSM8K.

A template is a question with marks and its calculation. `{a}` to `{e}` are numbers, `{name}`, `{friend}`, `{pron}`, `{things}` and
`{boxes}` words, `[x|y]` a choice. The difficulty is the number of calculation steps, each one line of the worked answer:

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

GRADES = tuple(TEMPLATES)
_LARGEST = {1: 50, 2: 100, 3: 200, 4: 400}
"""Largest number in a problem of that difficulty."""
_STEP = re.compile(r"(\w+) ([-+*/]) (\w+)")


@dataclass(frozen=True, slots=True, kw_only=True)
class Problem:
    """One generated problem."""

    question: str
    answer: str
    """Worked, with <<...>> annotations, ending in "#### N"."""
    difficulty: int


def problems(difficulty: int, seed: int) -> Iterator[Problem]:
    """Endless distinct problems of one difficulty: the same ones for the same seed, however many are taken."""
    rng = random.Random(f"synthetic/{seed}/{difficulty}")
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
    """Numbers for a template's slots (every result whole, positive and small), the worked lines, the final result."""
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
    """2 to 20 for sums, 2 to 10 for products and divisors, more for what is divided or paid with."""
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
    """The whole-number result, or None where there is none."""
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
