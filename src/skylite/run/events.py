"""`events.jsonl`: a timeline of the parent. Only the parent writes it; a resumed run appends to it."""

from __future__ import annotations

import json
import time
from pathlib import Path
from typing import Any, Literal

from skylite.run.files import append_line
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json

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
"""Extra fields of the events:

- sampling_* and rollouts_written: "step", and "version" of the adapter that is sampled from
- trainer_step_seen (the parent has read the trainer's result of a step): "step"
- adapter_*: "version"
"""


def append_event(path: Path, event: Event, **facts: int) -> None:
    """Append one event with wall-clock time and machine-wide monotonic time, in seconds."""
    line = json.dumps({"event": event, **facts, "monotonic": time.monotonic(), "wall": time.time()})
    append_line(path, line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events in order. Skips incomplete lines, which a killed writer leaves."""
    events = []
    for line in read_bytes(path).split(b"\n"):
        try:
            events.append(parse_json(line))
        except ValueError:
            continue
    return events
