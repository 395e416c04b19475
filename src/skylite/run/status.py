"""`status.json`: the current state of a run for other processes. Replaced atomically."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal, get_args

from skylite.errors import ConfigError
from skylite.run.files import write_json
from skylite.run.own_folders import LOCK_NAME, is_locked
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

Phase = Literal[
    "starting",
    "sampling",
    "training",
    "syncing",
    "evaluating",
    "stopping",
    "done",
    "stopped",
    "failed",
    "dead",
]
"""starting -> (evaluating) -> sampling -> training -> syncing -> sampling ... -> (evaluating) -> done.

Any phase can lead to stopping, stopped, failed or dead: killed, so that it could not write its end itself.
"""
ENDED: tuple[Phase, ...] = ("done", "stopped", "failed", "dead")


@dataclass(frozen=True, slots=True, kw_only=True)
class Status:
    """State of a run. After done, stopped, failed and dead it has no processes."""

    phase: Phase
    step: int
    """The current or last step."""
    num_steps: int
    adapter_version: int | None
    """The version that the engines serve; None before the first sync."""
    adapter_verified: bool | None = None
    """Whether the canary verified that version; False: it moved too little to tell; None: not checked yet."""
    pids: Mapping[str, int] = field(default_factory=dict)
    """Name -> process id of the parent and its children."""
    restarts: Mapping[str, int] = field(default_factory=dict)
    """Name -> number of restarts of a child by this parent."""
    error: str | None = None
    """Why the run failed, left its sweep, or waits in it."""
    warning: str | None = None
    """What is wrong with the run although it goes on."""
    updated_at: str = field(default_factory=lambda: datetime.now(UTC).isoformat(timespec="seconds"))


def write_status(path: Path, status: Status) -> None:
    """Replace the file atomically."""
    write_json(path, asdict(status))


def read_status(path: Path) -> Status:
    """Read the status. Raises ConfigError when the file is missing or damaged."""
    try:
        value = parse_json(read_text(path))
        status = Status(**{f.name: value[f.name] for f in fields(Status)})
        if not _has_right_types(status):
            raise ValueError("a value has the wrong type")
        return status
    except FileNotFoundError:
        raise ConfigError(
            f"{path.parent} is not a skylite run: {path.name} is missing.",
            "Give a folder made by `skylite train`.",
        ) from None
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(
            f"{path} is not a valid run status: {type(error).__name__} {error}.",
            "The run is damaged; start a new one.",
        ) from None


def current_status(root: Path) -> Status:
    """The status of a run, "dead" if its process is gone without an end. Raises as `read_status`."""
    status = read_status(root / "status.json")
    return status if status.phase in ENDED or is_alive(root, status) else replace(status, phase="dead")


def is_alive(root: Path, status: Status) -> bool:
    """Whether the run's lock is held: also by a process of another container, which has other process ids.

    Without a lock file, whether its process runs here. A killed run leaves the file, and its process id may
    belong to another program by now.
    """
    lock = root / LOCK_NAME
    return is_locked(lock) or (not lock.exists() and _has_process(status))


def _has_process(status: Status) -> bool:
    pid = status.pids.get("skylite", 0)
    if pid <= 0:
        return False
    try:
        os.kill(pid, 0)
    except (ProcessLookupError, OverflowError):
        return False
    except PermissionError:
        return True
    return True


def _has_right_types(status: Status) -> bool:
    numbers = (status.step, status.num_steps, status.adapter_version or 0)
    tables = (status.pids, status.restarts)
    return (
        status.phase in get_args(Phase)
        and all(type(n) is int for n in numbers)
        and all(isinstance(t, dict) and all(type(n) is int for n in t.values()) for t in tables)
        and isinstance(status.adapter_verified, bool | None)
        and isinstance(status.error, str | None)
        and isinstance(status.warning, str | None)
        and isinstance(status.updated_at, str)
    )
