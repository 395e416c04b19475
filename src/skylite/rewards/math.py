"""Mathematical answers compared as formulas, by math-verify."""

from __future__ import annotations

import re
import threading
from functools import lru_cache
from typing import Any

from skylite.errors import DataError
from skylite.types import Prompt

TIMEOUT_S = 5
"""For one parse or one comparison; math-verify measures it with SIGALRM."""
_WORDS = re.compile(r"(?<!\\)\b[A-Za-z]{3,}\b")
_FUNCTIONS = frozenset(
    ("sin", "cos", "tan", "cot", "sec", "csc", "arcsin", "arccos", "arctan", "log", "exp", "sqrt")
)


def math_reward(prompt: Prompt, completion: str) -> float:
    """1.0 when the completion's answer (the boxed one first) equals `prompt.answer` as a formula; 0.0 when it does not or when
    it cannot be parsed or compared in TIMEOUT_S. Raises DataError for an answer that is no formula."""
    from math_verify import ExprExtractionConfig, LatexExtractionConfig, parse, verify

    truth = parse_truth(prompt.answer)
    found = parse(
        completion,
        [LatexExtractionConfig(boxed_match_priority=0), ExprExtractionConfig()],
        parsing_timeout=_timeout(),
    )
    return float(verify(list(truth), found, timeout_seconds=_timeout()))


@lru_cache(maxsize=65536)
def parse_truth(answer: str) -> tuple[Any, ...]:
    """A reference answer as math-verify's candidates. Raises DataError when it is prose or cannot be parsed."""
    from math_verify import parse

    plain = parse(answer, fallback_mode="no_fallback", parsing_timeout=_timeout())
    if plain:
        return tuple(plain)
    # math-verify reads any word in dollars as a product of letters, so that "unknown" would become a usable answer.
    words = [w for w in _WORDS.findall(answer) if w not in _FUNCTIONS]
    formula = [] if words else parse(f"${answer}$", fallback_mode="no_fallback", parsing_timeout=_timeout())
    if not formula:
        reason = f"it has the word {words[0]!r}" if words else "math-verify cannot parse it"
        raise DataError(
            f"The answer {answer!r} is not a number or a formula: {reason}.",
            "Correct it, or use another --reward.",
        )
    return tuple(formula)


def _timeout() -> int | None:
    """SIGALRM works in a main thread only (where reward workers score); elsewhere there is no time limit."""
    return TIMEOUT_S if threading.current_thread() is threading.main_thread() else None
