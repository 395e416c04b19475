"""Data that `skylite prepare` makes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from skylite.cli.prepare import prepare_data
from skylite.cli.prepare_flags import PrepareFlags


def prepare(target: str, **flags: Any) -> Path:
    """The folder. Replaces the data of another command."""
    return prepare_data(PrepareFlags(target=target, replace=True, **flags))
