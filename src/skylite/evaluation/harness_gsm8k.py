"""GSM8K's strict and flexible scores as lm-evaluation-harness 0.4 computes them (its task gsm8k, version 3).

The harness asks "Question: ... Answer:" with five examples. Prompts are the data set's own here; the score
of a given output is equal.
"""

from __future__ import annotations

import re
from typing import Literal

Kind = Literal["strict", "flexible"]

STOPS = ("Question:", "</s>", "<|im_end|>")
"""The harness ends an output before the first of these."""
_STRICT = re.compile(r"#### (\-?[0-9\.\,]+)")
_FLEXIBLE = re.compile(r"(-?[$0-9.,]{2,})|(-?[0-9]+)")
_INVALID = "[invalid]"


def harness_score(kind: Kind, completion: str, answer: str) -> float:
    """1.0 if the extracted number and the answer are equal as text after normalisation, else 0.0."""
    output = completion
    for stop in STOPS:
        output = output.partition(stop)[0]
    found = _strict(output) if kind == "strict" else _flexible(output)
    return float(_normalise(found) == _normalise(answer))


def _strict(output: str) -> str:
    """The first number after `#### `."""
    match = _STRICT.search(output)
    return _INVALID if match is None else match[1].strip()


def _flexible(output: str) -> str:
    """The last number."""
    matches = list(_FLEXIBLE.finditer(output))
    return (matches[-1][1] or matches[-1][2]).strip() if matches else _INVALID


def _normalise(text: str) -> str:
    text = text.replace(",", "").replace("$", "").rpartition("#### ")[2]
    return re.sub(r"\.$", "", text).lower()
