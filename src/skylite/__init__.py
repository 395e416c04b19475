"""skylite: reinforcement learning of a LoRA adapter on one machine."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from skylite.api import Run

__version__ = "0.2.0"


def load_run(path: str | Path) -> Run:
    """Read a run folder; docs/reference/python-api.md shows what is in it. Raises ConfigError."""
    # Here, so that `skylite --help` imports neither pyarrow nor pydantic.
    from skylite.api import load_run as load

    return load(path)
