"""Text that is not ours: names, rows, completions and files of strangers."""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterable
from typing import Any


def plain(text: str) -> str:
    """`text` without characters that move the cursor, colour the terminal or change the writing direction.

    Control characters (C0 and C1), escape sequences, bidirectional overrides, invisible characters and line
    breaks become spaces.
    """
    return "".join(c if c.isprintable() else " " for c in text)


def plain_lines(text: str) -> str:
    """`plain` for each line: only line breaks stay."""
    return "\n".join(map(plain, text.split("\n")))


def encodable(text: str) -> str:
    """`text` as it can be stored and sent: two halves of a character become it, a lone half U+FFFD."""
    try:
        text.encode()
    except UnicodeEncodeError:
        return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
    return text


def encodable_json(value: Any) -> Any:
    """A value of JSON with `encodable` texts and keys."""
    text = json.dumps(value, ensure_ascii=False)
    return value if (safe := encodable(text)) is text else json.loads(safe)


MAX_DEPTH = 100
"""Levels of nested JSON. Code that walks a value recursively would reach Python's limit of 1,000."""
MAX_DIGITS = 300
"""Digits of an integer in JSON: with as many it still converts to a float."""
SURROGATE = re.compile(rb"\\u[dD][89a-fA-F]")
"""An escape in JSON for half of a character beyond U+FFFF."""


def parse_json(text: str | bytes) -> Any:
    """`json.loads` for strangers' text: raises ValueError also where other code could not use the value.

    That is deeper nesting than MAX_DEPTH, an integer of more than MAX_DIGITS digits, and half a surrogate
    pair, which no file can hold as text.
    """
    try:
        value = json.loads(text, parse_int=_parse_int)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    _check_depth(value)
    if SURROGATE.search(text if isinstance(text, bytes) else text.encode("utf-8", "surrogatepass")):
        json.dumps(value, ensure_ascii=False).encode()  # UnicodeEncodeError is a ValueError
    return value


def _check_depth(value: Any) -> None:
    level = [value]
    for _ in range(MAX_DEPTH):
        if not (level := [inner for outer in level for inner in _nested(outer)]):
            return
    raise ValueError("it is nested too deeply")


def _parse_int(digits: str) -> int:
    if len(digits) > MAX_DIGITS:
        raise ValueError(f"it has an integer of {len(digits)} digits")
    return int(digits)


def _nested(value: Any) -> Iterable[Any]:
    """The lists and dicts directly in a list or dict."""
    inner = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return (v for v in inner if isinstance(v, dict | list))


def parse_toml(text: str) -> dict[str, Any]:
    """`tomllib.loads`, which raises TOMLDecodeError also for deep nesting and for huge integers."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        raise
    except RecursionError:
        raise tomllib.TOMLDecodeError("it is nested too deeply") from None
    except ValueError:
        raise tomllib.TOMLDecodeError("it has an integer of thousands of digits") from None
