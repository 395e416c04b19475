"""Settings of checkpoints, of held-out evaluation, which scores them, and of how a run stops."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from skylite.config.base_section import Section


class CheckpointConfig(Section):
    """Checkpoints that --resume continues from."""

    every: int | None = Field(None, ge=1)
    """Steps between checkpoints. None: each step, or as many steps as keep their cost below 2 % of the run's
    time, measured as it runs. The last step and a clean stop always write one."""
    keep_last: int = Field(2, ge=1)
    """Newest checkpoints to keep."""
    keep_best: int = Field(0, ge=0)
    """Also keep the N checkpoints with the highest held-out score. Needs eval.limit and eval.every."""


class StopConfig(Section):
    """How Ctrl-C and SIGTERM end a run."""

    mode: Literal["finish", "abandon"] = "finish"
    """What the first signal does with the current step. A second signal ends everything immediately."""
    grace_s: float = Field(25.0, ge=5)
    """Seconds from SIGTERM or SIGHUP to the end of all processes: the step has 60 %, step and checkpoint
    together 80 %. Clusters usually kill 30 s after SIGTERM. Ctrl-C gives the step all the time it needs."""


class EvalConfig(Section):
    """Held-out evaluation during a run."""

    split: Literal["train", "validation", "test"] = "test"
    """Split that the held-out problems come from. With checkpoint.keep_best take validation: on the problems
    that chose a version, its score is too good."""
    limit: int = Field(0, ge=0)
    """Number of held-out problems before and after the run: sampled greedily, or scored by the trainer with
    algorithm.name=sft and dpo. 0: no evaluation."""
    every: int = Field(0, ge=0)
    """Also evaluate every N steps. 0: only before and after the run."""
