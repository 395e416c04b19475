"""`status.json`: where a run is, for whoever looks from outside. Replaced as a whole, so a reader never sees half of it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from skylite.errors import ConfigError
from skylite.run.files import write_json

Phase = Literal[
    "starting", "sampling", "training", "syncing", "evaluating", "stopping", "done", "stopped", "failed"
]
"""starting -> (evaluating) -> sampling -> training -> syncing -> sampling ... -> (evaluating) -> done; stopped and failed from anywhere."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """A run at one moment. After done, stopped or failed there are no processes."""

    phase: Phase
    step: int
    """The step that is under way, or the last one."""
    num_steps: int
    adapter_version: int | None
    """What the engines serve; None before the first sync."""
    pids: Mapping[str, int] = field(default_factory=dict)
    """Name to process id: the parent and its children."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Name of a child to how often it was started again, by this parent."""
    error: str | None = None
    updated_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def write_status(path: Path, status: Status) -> None:
    """Replace the file atomically."""
    write_json(path, asdict(status), durable=False)


def read_status(path: Path) -> Status:
    """Raises ConfigError when the file is missing or damaged."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
        return Status(**{f.name: value[f.name] for f in fields(Status)})
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} is not a skylite run: {path.name} is missing.",
            "Give a folder made by `skylite train`.",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is no run status: {type(error).__name__} {error}.",
            "The run is damaged; start a new one.",
        ) from None
