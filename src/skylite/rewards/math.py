"""Compares mathematical answers as formulas, with math-verify."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any

from skylite.errors import DataError

TIMEOUT_S = 5
"""Limit for one parse or one comparison. math-verify enforces it with SIGALRM."""
_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{3,}\b")
_TEXT = re.compile(r"\\(?:(?:text|mbox)(?:bf|it|rm)?|begin|end)\{[^{}]*\}")
"""Words that LaTeX marks: text, such as a name, and environments."""
_BOXED = re.compile(r"\\f?boxed\s*\{")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "exp", "sqrt")
)


def math(completion: str, *, answer: str) -> float:
    """1.0 if the completion's answer, boxed first, equals `answer` as a formula, else 0.0.

    0.0 also if parsing or comparing fails or exceeds TIMEOUT_S. Raises DataError if `answer` is not a
    formula.
    """
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    truth = parse_truth(answer)
    found = parse(
        completion,
        [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=_timeout(),
    )
    return float(verify(list(truth), found, timeout_seconds=_timeout()))


@lru_cache(maxsize=65536)
def parse_truth(answer: str) -> tuple[Any, ...]:
    """Parse a reference answer into math-verify's candidates. Raises DataError for prose or a parse error."""
    from math_verify import parse

    # math-verify parses any word in a formula as a product of letters, even "unknown".
    words = [w for w in _WORDS.findall(_TEXT.sub(" ", answer)) if w not in _FUNCTIONS]
    # Without delimiters math-verify takes the first number: 3 for 3\sqrt{13}.
    forms = [answer] if words else [f"\\boxed{{{answer}}}", answer]
    parsed = (parse(f, fallback_mode="no_fallback", parsing_timeout=_timeout()) for f in forms)
    formula = next(filter(None, parsed), None)
    if not formula:
        reason = f"it contains the word {words[0]!r}" if words else "math-verify cannot parse it"
        raise DataError(
            f"The answer {answer!r} is not a number or a formula: {reason}.",
            "Correct it, or use another --reward.",
        )
    return tuple(formula)


def closed_box(text: str) -> str | None:
    r"""The content of the last \boxed{...} that is closed, without whitespace; None without one."""
    for match in reversed(list(_BOXED.finditer(text))):
        depth = 1
        for end in range(match.end(), len(text)):
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            if depth == 0:
                return "".join(text[match.end() : end].split())
    return None


def _timeout() -> int | None:
    """No limit outside of the main thread, because SIGALRM only works there. Reward workers score in it."""
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
