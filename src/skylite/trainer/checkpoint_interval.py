"""How often to write a checkpoint: each step, while that costs little."""

from __future__ import annotations

import math
import statistics
from collections import deque
from dataclasses import dataclass, field

MOST_COST = 0.02
"""Largest share of the run's time that checkpoints may take, if checkpoint.every is not set."""
RECENT = 5


@dataclass(slots=True)
class CheckpointInterval:
    """Measures steps and checkpoints, and says when one is due."""

    every: int | None
    """checkpoint.every. None: chosen by the measured cost."""
    steps_since: int = 0
    """Steps since the last checkpoint."""
    _step_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))
    _cost_s: deque[float] = field(default_factory=lambda: deque(maxlen=RECENT))

    def step_ended(self, seconds: float | None) -> None:
        """Note a step that took so long, without its checkpoint. None: do not measure by this step."""
        if seconds is not None:
            self._step_s.append(seconds)
        self.steps_since += 1

    def written(self, seconds: float) -> None:
        """Note a checkpoint that took so long."""
        self._cost_s.append(seconds)
        self.steps_since = 0

    @property
    def is_measured(self) -> bool:
        """Whether a step and a checkpoint have been measured."""
        return bool(self._cost_s and self._step_s)

    @property
    def steps(self) -> int:
        """Steps between checkpoints; 1 before anything was measured."""
        if self.every is not None:
            return self.every
        if not self.is_measured:
            return 1
        step_s = max(statistics.median(self._step_s), 1e-9)
        return max(1, math.ceil(statistics.median(self._cost_s) / (MOST_COST * step_s)))

    def is_due(self, step: int) -> bool:
        """Whether the step that has just ended gets a checkpoint."""
        return step % self.every == 0 if self.every is not None else self.steps_since >= self.steps

    def __str__(self) -> str:
        cost, step = statistics.median(self._cost_s), statistics.median(self._step_s)
        often = "after each step" if self.steps == 1 else f"every {self.steps} steps"
        lost = "" if self.steps == 1 else "; a kill -9 loses the training, not the completions, in between"
        return f"checkpoints {often}: one takes {cost:.2g} s, a step {step:.3g} s{lost} (checkpoint.every)"
