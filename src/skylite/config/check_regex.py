"""Regexes in settings and data: refused before they are compiled if that could fill the memory."""

from __future__ import annotations

import math
import re

MOST_PARTS = 100_000
"""Of a regex with its counted repeats written out. The compiler does that: (?:a{1000}){1000} takes 270 MB."""
_TOKEN = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]|\{(?P<count>\d+)[,}]|.", re.DOTALL)
_COMMENTS = re.compile(r"\(\?#|\(\?[A-Za-z]*x")
"""Comments and the flag x allow anything between a part and its count."""


def check_regex(pattern: str) -> None:
    """Raise ValueError, in a sentence, for a pattern that is not a regex or too large."""
    import regex

    if (count := _num_parts(pattern)) > MOST_PARTS:
        raise ValueError(
            f"{pattern[:200]!r} has {min(count, 10**18):,} parts with its repeats written out, more than "
            f"{MOST_PARTS:,}; use smaller counts, or + and *."
        )
    try:
        regex.compile(pattern)
    except regex.error as error:
        raise ValueError(
            f"{pattern[:200]!r} is not a regex: {error}; quote it as a TOML literal, '...'."
        ) from None
    except (RecursionError, OverflowError, MemoryError):
        raise ValueError(f"{pattern[:200]!r} is nested too deeply, or too large.") from None


def _num_parts(pattern: str) -> int:
    tokens = list(_TOKEN.finditer(pattern))
    counts = [int(count[:18]) for token in tokens if (count := token["count"])]
    if _COMMENTS.search(pattern):
        return len(pattern) * math.prod(max(1, count) for count in counts[:100])
    sums, last = [0], 0
    for token in tokens:
        text = token[0]
        if (count := token["count"]) is not None:
            repeated = last * max(1, int(count[:18]))
            sums[-1] += repeated - last
            last = repeated
        elif text == "(":
            sums.append(1)
        elif text == ")" and len(sums) > 1:
            last = sums.pop()
            sums[-1] += last
        elif text not in ("?", "*", "+"):
            last = len(text)
            sums[-1] += last
    return sum(sums)
