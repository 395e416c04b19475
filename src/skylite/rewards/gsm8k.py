"""GSM8K's rule: the answer is the number after the last `####` (arXiv 2110.14168, section 2)."""

from __future__ import annotations

import re
from fractions import Fraction

MARK = "####"
_NUMBER = re.compile(
    r"""[ \t]*
        (?P<before>-?) [ \t]* [$\u20ac\u00a3]? [ \t]*      # -$5 and $-5 are equal
        (?P<sign>[-+]?)
        (?P<digits>[0-9]{1,3}(?:,[0-9]{3})+ (?![0-9]) | [0-9]+)?
        (?P<decimals>\.[0-9]+)?
        (?P<rest>[^\n]*)""",
    re.VERBOSE,
)
_LONGEST = 40
"""Largest number of characters in a number; Python refuses to convert thousands of digits."""


def gsm8k(completion: str, *, answer: str) -> float:
    """1.0 if the number after the last `####` equals the answer as a number (1,080.0 = 1080), else 0.0."""
    found = final_number(completion)
    return float(found is not None and found == parse_number(answer))


def has_final_number(completion: str) -> float:
    """1.0 if there is a number after the last `####`, right or wrong, else 0.0."""
    return float(final_number(completion) is not None)


def final_number(text: str) -> Fraction | None:
    """The number after the last `####`, or None."""
    _, mark, tail = text.rpartition(MARK)
    return parse_number(tail) if mark else None


def parse_number(text: str) -> Fraction | None:
    """The number at the start of a line, or None.

    Thousands commas, a currency sign, a percent sign and a unit are allowed. A second number in the line is
    not: `72 / 3` is not an answer.
    """
    match = _NUMBER.match(text)
    if (
        match is None
        or (match["digits"] is None and match["decimals"] is None)
        or re.search("[0-9]", match["rest"])
    ):
        return None
    digits = (match["digits"] or "0").replace(",", "") + (match["decimals"] or "")
    if len(digits) > _LONGEST:
        return None
    value = Fraction(digits)
    return -value if "-" in (match["before"], match["sign"]) else value
