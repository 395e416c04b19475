"""`--max-hours`: a stop at the border of steps, before a step that would end too late."""

from __future__ import annotations

import asyncio
import time
from dataclasses import dataclass, field


@dataclass(slots=True)
class TimeLimit:
    """Asks for a stop in time. None of its fields says anything of the run itself: the same run may go on under another limit."""

    hours: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    """Of the steps so far: what the next one is taken to need."""
    reached: bool = False

    def step_ended(self, step_s: float) -> bool:
        """Note a finished step; whether the run is to end here, in which case `stop` is set."""
        self.longest_s = max(self.longest_s, step_s)
        if time.monotonic() - self.started + self.longest_s > 3600 * self.hours:
            self.reached = True
            self.stop.set()
        return self.reached

    def __str__(self) -> str:
        return f"--max-hours {self.hours:g}: the next step, at {self.longest_s:.1f} s, would end after the limit"
