"""`NAME KEY=VALUE ...`: a named task or environment, and its settings, in one text.

KEY may be a path, as in taskset.game. VALUE is JSON, or else text.
"""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from typing import Any

from skylite.errors import ConfigError
from skylite.untrusted_text import parse_json

REASONING_GYM = "reasoning-gym:"
"""Begins the spec of a reasoning-gym task."""


def split_spec(spec: str, prefix: str, example: str) -> tuple[str, list[str]]:
    """The name, and the words after it. `example` is part of the error. Raises ConfigError."""
    try:
        name, *words = shlex.split(spec.removeprefix(prefix)) or [""]
    except ValueError as error:
        raise ConfigError(
            f"{spec} cannot be read as words: {error}.", f"Quote it as in a shell. {example}"
        ) from None
    return name, words


def read_settings(
    spec: str, words: Sequence[str], example: str, *, reserved: Sequence[str] = ()
) -> dict[str, Any]:
    """The settings of KEY=VALUE words, nested by the parts of KEY; none of `reserved`. Raises ConfigError."""
    settings: dict[str, Any] = {}
    for word in words:
        key, equals, text = word.partition("=")
        *path, last = key.split(".")
        if not equals or not all(part.isidentifier() for part in (*path, last)) or key in reserved:
            raise ConfigError(f"{spec}: {word!r} is not a setting.", f"Use KEY=VALUE. {example}")
        target = settings
        for part in path:
            target = target.setdefault(part, {})
            if not isinstance(target, dict):
                raise ConfigError(f"{spec} gives {part} a value and then parts.", "Remove one of them.")
        if last in target:
            raise ConfigError(f"{spec} gives {key} twice.", "Remove one of them.")
        target[last] = _value(text)
    return settings


def _value(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return text
