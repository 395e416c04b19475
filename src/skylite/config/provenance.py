"""Where the value of a setting comes from: the command line, a file, or its default."""

from __future__ import annotations

import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from skylite.errors import ConfigError
from skylite.untrusted_text import parse_toml


class Typed(NamedTuple):
    """A value that the user typed."""

    value: Any
    flag: str
    """--lr, or --set"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Provenance:
    """What the user typed, and the file that gives the other settings; the rest are defaults.

    Programs depend on it: one that a file names does not run until the user names it.
    """

    typed: Mapping[str, Typed] = field(default_factory=dict)
    """Dotted setting -> what the user typed."""
    file: Path | None = None
    """The recipe, or the run, that gives other settings. None: the user chose all."""

    def is_typed(self, setting: str) -> bool:
        """Whether the user typed this setting, such as lora.rank."""
        return setting in self.typed

    def file_of(self, setting: str) -> Path | None:
        """The file that may give this setting; None if the user typed it or there is no file."""
        return None if setting in self.typed else self.file


NOTHING_TYPED = Provenance()


def from_command_line(texts: Sequence[str], flags: Mapping[str, Typed] | None = None) -> Provenance:
    """What `--set` and the flags of settings say. Raises ConfigError.

    Args:
        texts: `a.b=value` from `--set`, in TOML syntax; a bare word is a string.
        flags: dotted setting -> value and flag.
    """
    typed = dict(flags or {})
    for text in texts:
        setting, equals, value = (part.strip() for part in text.partition("="))
        if not equals or not setting:
            raise ConfigError(
                f"--set {text} sets nothing.", "Give a.b=value, e.g. --set rollout.group_size=16."
            )
        if setting in typed and (flag := typed[setting].flag) != "--set":
            raise ConfigError(f"{flag} and --set {setting} both choose {setting}.", "Remove one of them.")
        typed[setting] = Typed(parse_value(value), "--set")
    return Provenance(typed=typed)


def parse_value(text: str) -> Any:
    """A `--set` value in TOML syntax. `none` becomes None, and text that is not TOML stays a string."""
    if text == "none":
        return None
    try:
        return parse_toml(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text
