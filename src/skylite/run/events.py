"""`events.jsonl`: what the parent did and when. Written by the parent alone; a resumed run goes on in the same file."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from skylite.run.files import append_line

Event = Literal[
    "run_started",
    "engines_started",
    "trainer_started",
    "tokenizer_ready",
    "engines_ready",
    "sampling_started",
    "sampling_ended",
    "rollouts_written",
    "trainer_step_seen",
    "adapter_loaded",
    "adapter_verified",
    "adapter_unloaded",
]
"""sampling_* and rollouts_written carry "step" and "version" (what is sampled from), trainer_step_seen "step", adapter_* "version"."""


def append_event(path: Path, event: Event, **facts: int) -> None:
    """Append one event, with the wall clock's time and the machine-wide monotonic clock's, in seconds."""
    line = json.dumps({"event": event, **facts, "monotonic": time.monotonic(), "wall": time.time()})
    append_line(path, line, durable=False)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events in order; a line torn by a kill is left out."""
    events = []
    for line in path.read_bytes().split(b"\n"):
        try:
            events.append(json.loads(line))
        except ValueError:
            continue
    return events
