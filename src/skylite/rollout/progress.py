"""Report the run's phase to the user (screen) and to other programs (status.json) in one call."""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from skylite.run.events import Event, append_event
from skylite.run.run_dir import RunDir
from skylite.run.status import Phase, Status, write_status
from skylite.ui.dashboard import Screen

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class Progress:
    """The run's state. The step loop sets `step`, `recorded` and `adapter_version`."""

    run: RunDir
    num_steps: int
    screen: Screen
    child_pids: Callable[[], Mapping[str, int]]
    step: int = 0
    """The current step; equal to `recorded` between steps."""
    recorded: int = 0
    """The last step whose metrics are in metrics.jsonl."""
    adapter_version: int | None = None
    adapter_verified: bool | None = None
    """Whether the canary verified that version, or it moved too little to tell."""
    restarts: dict[str, int] = field(default_factory=dict)
    """Child process name -> number of restarts, over all starts of the trainer."""
    warning: str | None = None
    """For status.json."""

    step_since: float = field(default_factory=time.monotonic)
    """When the current step began."""

    def begin_step(self, step: int) -> None:
        self.step, self.step_since = step, time.monotonic()

    def phase(self, phase: Phase, detail: str = "", error: str | None = None) -> None:
        """Enter a phase: show it and write status.json."""
        self.screen.phase(phase, detail)
        pids = {"skylite": os.getpid(), **self.child_pids()}
        write_status(
            self.run.status_path,
            Status(
                phase=phase,
                step=self.step,
                num_steps=self.num_steps,
                adapter_version=self.adapter_version,
                adapter_verified=self.adapter_verified,
                pids=pids,
                restarts=self.restarts,
                error=error,
                warning=self.warning,
            ),
        )

    def event(self, event: Event, **facts: int) -> None:
        """Append an event with its time to events.jsonl."""
        append_event(self.run.events_path, event, **facts)
        logger.debug(" ".join([event, *(f"{name}={value}" for name, value in facts.items())]))
