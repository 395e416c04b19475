"""Generated grade-school word problems in GSM8K's format, for machines without a hub and for small models.

A template is a question and its calculation. `{a}` to `{e}` stand for numbers, `{name}`,
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
from itertools import count
from typing import Any

_LARGEST = {1: 50, 2: 100, 3: 200, 4: 400}
"""Difficulty -> largest number in a problem."""
_STEP = re.compile(r"(\w+) ([-+*/]) (\w+)")


def problems(difficulty: int, seed: int) -> Iterator[dict[str, Any]]:
    """Endless distinct rows of one difficulty. The sequence depends on the seed only."""
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
            answer = "\n".join([*lines, f"#### {result}"])
            yield {"question": question, "answer": answer, "difficulty": difficulty}


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


NAMES = (
    ("Ada", "she"), ("Amir", "he"), ("Anna", "she"), ("Ben", "he"), ("Bianca", "she"), ("Carl", "he"),
    ("Chloe", "she"), ("Dan", "he"), ("Diego", "he"), ("Elena", "she"), ("Emma", "she"), ("Eric", "he"),
    ("Fatima", "she"), ("Finn", "he"), ("Grace", "she"), ("Hana", "she"), ("Hugo", "he"), ("Ines", "she"),
    ("Ivan", "he"), ("Jack", "he"), ("Jana", "she"), ("Jorge", "he"), ("Kim", "she"), ("Leo", "he"),
    ("Lily", "she"), ("Lucas", "he"), ("Maria", "she"), ("Mei", "she"), ("Milo", "he"), ("Nina", "she"),
    ("Noah", "he"), ("Olga", "she"), ("Omar", "he"), ("Paul", "he"), ("Priya", "she"), ("Rosa", "she"),
    ("Ravi", "he"), ("Sam", "he"), ("Sara", "she"), ("Tom", "he"), ("Uma", "she"), ("Victor", "he"),
    ("Wendy", "she"), ("Yusuf", "he"), ("Zoe", "she"),
)  # fmt: skip

THINGS = (
    "apples", "balloons", "beads", "books", "buttons", "cards", "coins", "cookies", "crayons", "cupcakes",
    "dolls", "eggs", "erasers", "feathers", "flowers", "grapes", "hats", "keys", "kites", "lemons", "marbles",
    "mugs", "muffins", "notebooks", "oranges", "peaches", "pears", "pencils", "pens", "photos", "pies",
    "plums", "posters", "puzzles", "ribbons", "rocks", "seeds", "shells", "spoons", "stamps", "stickers",
    "tickets", "toys",
)  # fmt: skip

CONTAINERS = ("bags", "baskets", "boxes", "jars", "packs", "trays", "crates", "bowls")

TEMPLATES: dict[int, tuple[tuple[str, str], ...]] = {
    1: (
        (
            "{name} has {a} {things}. {Pron} [gets|buys|finds|picks up] {b} more. How many {things} does "
            "{name} have now?",
            "a + b",
        ),
        ("{name} has {a} {things} and {friend} has {b}. How many {things} do they have together?", "a + b"),
        (
            "There are {a} {things} on the table and {b} in the box. How many {things} are there in all?",
            "a + b",
        ),
        (
            "{name} [made|sold|packed] {a} {things} on Monday and {b} on Tuesday. How many {things} is "
            "that in total?",
            "a + b",
        ),
        (
            "{friend} gives {name} {b} {things}. {name} already had {a}. How many {things} does {name} "
            "have now?",
            "a + b",
        ),
        (
            "{name} has {a} {things}. {Pron} [gives away|loses|sells|uses] {b}. How many {things} are left?",
            "a - b",
        ),
        (
            "{name} had {a} {things} and gave {b} to {friend}. How many {things} does {name} have left?",
            "a - b",
        ),
        (
            "{name} has {a} {things} and {friend} has {b}. How many more {things} does {name} have than "
            "{friend}?",
            "a - b",
        ),
        ("{name} wants {a} {things}. {Pron} has {b} so far. How many more does {pron} need?", "a - b"),
        (
            "There were {a} {things} in the shop. {name} bought {b}. How many {things} are still in the "
            "shop?",
            "a - b",
        ),
        ("{name} has {a} {boxes} with {b} {things} in each. How many {things} is that?", "a * b"),
        ("{name} buys {a} {things}. Each one costs ${b}. How many dollars does {pron} pay?", "a * b"),
        ("{name} reads {a} pages a day. How many pages does {pron} read in {b} days?", "a * b"),
        ("{a} friends get {b} {things} each. How many {things} do they get in total?", "a * b"),
    ),
    2: (
        (
            "{name} has {a} {things}. {Pron} [buys|finds] {b} more and gives {c} to {friend}. How many "
            "{things} are left?",
            "a + b; r - c",
        ),
        (
            "{name} had {a} {things}. {Pron} lost {b} and then got {c} more. How many {things} does "
            "{name} have now?",
            "a - b; r + c",
        ),
        (
            "{name} has {a} {boxes} with {b} {things} in each and {c} more {things}. How many {things} is "
            "that in all?",
            "a * b; r + c",
        ),
        (
            "{name} fills {a} {boxes} with {b} {things} each, then [sells|gives away] {c}. How many "
            "{things} are left?",
            "a * b; r - c",
        ),
        (
            "{name} has {a} {things}. {friend} has {b} more than {name}. How many {things} do they have "
            "together?",
            "a + b; a + r",
        ),
        (
            "{name} has {a} {things}. {friend} has {b} times as many. How many {things} do they have "
            "together?",
            "a * b; a + r",
        ),
        (
            "{name} shares {a} {things} equally among {b} friends. {friend} gets {c} more. How many does "
            "{friend} have?",
            "a / b; r + c",
        ),
        (
            "{name} and {friend} pick {a} and {b} {things}. They put {c} in each of the {boxes}. How many "
            "{boxes} do they fill?",
            "a + b; r / c",
        ),
        (
            "{name} buys {a} {things} at ${b} each and pays with ${c}. How many dollars does {pron} get "
            "back?",
            "a * b; c - r",
        ),
        (
            "{name} saves ${a} a week for {b} weeks. A toy costs ${c} less than that. How much does the "
            "toy cost?",
            "a * b; r - c",
        ),
        (
            "{name} had {a} {things}, gave {b} to {friend} and put the rest into {boxes} of {c}. How many "
            "{boxes} is that?",
            "a - b; r / c",
        ),
        (
            "A book has {a} pages. {name} read {b} pages and then {c} more. How many pages are left?",
            "b + c; a - r",
        ),
    ),
    3: (
        (
            "{name} has {a} {boxes} of {b} {things}. {Pron} buys {c} more and gives {d} away. How many "
            "{things} are left?",
            "a * b; r + c; r - d",
        ),
        (
            "{name} has {a} {things}, {friend} has {b} times as many. They give away {c}. How many are left?",
            "a * b; a + r; r - c",
        ),
        (
            "{name} sells {a} {things} at ${b} each and {c} mugs at ${d} each. How many dollars is that?",
            "a * b; c * d; r1 + r2",
        ),
        (
            "{name} earns ${a} an hour. {Pron} works {b} hours, then spends ${c} and ${d}. How much is left?",
            "a * b; c + d; r1 - r2",
        ),
        (
            "{name} had {a} {things}. {Pron} used {b} and {c}, and shared the rest among {d} friends. How "
            "many did each get?",
            "a - b; r - c; r / d",
        ),
        (
            "{name} picks {a} {things} a day for {b} days and puts {c} in each of the {boxes}, of which "
            "{pron} sells {d}. How many {boxes} are left?",
            "a * b; r / c; r - d",
        ),
        (
            "{a} buses carry {b} people each and {c} cars carry {d} people each. How many more people are "
            "in the buses?",
            "a * b; c * d; r1 - r2",
        ),
        (
            "{name} has {a} {things}. {friend} has {b} more than {name}, and Max has {c} times as many as "
            "{friend}. How many has Max more than {name}?",
            "a + b; r * c; r - a",
        ),
        (
            "{name} bakes {a} trays of {b} muffins. {friend} bakes {c}. They share all of them among {d} "
            "guests. How many does each get?",
            "a * b; r + c; r / d",
        ),
        (
            "{name} reads {a} pages on each of {b} days and {c} pages on the next day. The book has {d} "
            "pages. How many are left?",
            "a * b; r + c; d - r",
        ),
        (
            "{name} puts {a} {things} into {b} equal {boxes}. {Pron} adds {c} to one of the {boxes} and "
            "takes {d} out. How many are in it?",
            "a / b; r + c; r - d",
        ),
    ),
    4: (
        (
            "{name} has {a} {boxes} of {b} {things} and {friend} has {c} {boxes} of {d}. They give away "
            "{e}. How many are left?",
            "a * b; c * d; r1 + r2; r3 - e",
        ),
        (
            "{name} works {a} hours at ${b} and {c} hours at ${d}, and saves it for {e} equal gifts. How "
            "many dollars is each?",
            "a * b; c * d; r1 + r2; r3 / e",
        ),
        (
            "{name} had {a} {things}. {Pron} bought {b} packs of {c}, lost {d}, and gave {friend} {e}. "
            "How many are left?",
            "b * c; a + r; r - d; r - e",
        ),
        (
            "{name} sells {a} {things} at ${b} each, pays ${c} for paper and ${d} for paint, and then "
            "earns ${e}. How much does {pron} have?",
            "a * b; r - c; r - d; r + e",
        ),
        (
            "{name} has {a} {things}. {friend} has {b} times as many. Together they buy {c} more and fill "
            "{boxes} of {d}. How many {boxes} is that?",
            "a * b; a + r; r + c; r / d",
        ),
        (
            "A shop has {a} shelves with {b} {things} and {c} shelves with {d}. It sells {e} a day. How "
            "many days do they last?",
            "a * b; c * d; r1 + r2; r3 / e",
        ),
        (
            "{name} shares {a} {things} equally among {b} friends. {friend} is one of them. {friend} gets "
            "{c} more, doubles that, and loses {d}. How many does {friend} have?",
            "a / b; r + c; r * 2; r - d",
        ),
        (
            "{name} buys {a} {things} at ${b} and {c} cards at ${d}. {Pron} pays with ${e}. How many "
            "dollars does {pron} get back?",
            "a * b; c * d; r1 + r2; e - r3",
        ),
        (
            "{name} picks {a} {things} on Monday, {b} more than that on Tuesday, and {c} on Wednesday. "
            "{Pron} packs {d} in each of the {boxes}. How many {boxes} is that?",
            "a + b; a + r1; r2 + c; r3 / d",
        ),
        (
            "{name} has ${a}. {Pron} gets ${b} a week for {c} weeks, spends ${d}, and gives half of the "
            "rest to {friend}. How much does {friend} get?",
            "b * c; a + r; r - d; r / 2",
        ),
    ),
}
"""Difficulty -> (question, steps). ";" separates steps; r is the last result, r1, r2, ... all results."""
DIFFICULTIES = tuple(TEMPLATES)
