"""Settings as a user types them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skylite.config import loading
from skylite.config.provenance import Provenance, Typed, from_command_line
from skylite.config.train import TrainConfig


def typed(
    values: Mapping[str, Any], texts: Sequence[str] = (), flags: Mapping[str, str] | None = None
) -> Provenance:
    """Values from flags, and the texts of `--set`. `flags`: setting -> its flag, for messages."""
    names = flags or {}
    return from_command_line(texts, {key: Typed(value, names.get(key, "")) for key, value in values.items()})


def load_config(
    recipe: Path | None,
    values: Mapping[str, Any] | None = None,
    texts: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
) -> TrainConfig:
    """The settings of a recipe with what the user typed."""
    return loading.load_config(recipe, typed(values or {}, texts, flags))
