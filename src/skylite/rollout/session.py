"""What the parts of a run's loop share: plan, engines, rollout source, progress and time limit.

Progress is shown on the screen and written to status.json and events.jsonl. Only the parent writes them.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, Protocol

from skylite.data.prompt_history import PromptHistory
from skylite.engine.engine_pool import EnginePool
from skylite.environments.judge import Judge
from skylite.environments.source import RolloutSource
from skylite.environments.teacher_server import TeacherServer
from skylite.rollout.plan import RunPlan
from skylite.run.files import append_line
from skylite.run.run_dir import AdapterVersion, RunDir, adapter_name
from skylite.run.status import Phase, Status, write_status
from skylite.ui.dashboard import Screen
from skylite.untrusted_files import read_bytes
from skylite.untrusted_text import parse_json

logger = logging.getLogger(__name__)


class StepWatch(Protocol):
    """Looks at each step but the last, and may stop the session after it."""

    def step_ended(self, plan: RunPlan, metrics: Mapping[str, Any]) -> str:
        """Note a finished step. Returns why the session stops, with the stop requested, or ""."""


@dataclass(slots=True)
class TimeLimit:
    """Request a stop before a time limit passes. Not part of the run: a resume may use another limit."""

    hours: float
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    started: float = field(default_factory=time.monotonic)
    longest_s: float = 0.0
    """Longest step so far, in seconds: the estimate for the next one."""
    reached: bool = False

    def step_ended(self, plan: RunPlan, metrics: Mapping[str, Any]) -> str:
        """As of `StepWatch`: stop if the next step would pass the limit."""
        self.longest_s = max(self.longest_s, metrics["time/step_s"])
        if time.monotonic() - self.started + self.longest_s <= 3600 * self.hours:
            return ""
        self.reached = True
        self.stop.set()
        return (
            f"--max-hours {self.hours:g}: stopping, because the next step ({self.longest_s:.1f} s) "
            "would pass the limit"
        )


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
    "engines_asleep",
    "engines_awake",
    "engine_left_out",
    "engine_taken_back",
]
"""Extra fields of the events:

- sampling_* and rollouts_written: "step", and "version" of the adapter that is sampled from. With
  rollout.max_staleness of 2 or more, sampling_started has the number of a batch as "step"; the others the
  oldest version
- trainer_step_seen (the parent has read the trainer's result of a step): "step"
- adapter_*: "version"
- engines_asleep and engines_awake (engine.sleep): "step" that the trainer computes between them
- engine_* (of engine.urls): "engine", its number
"""


def append_event(path: Path, event: Event, **facts: int) -> None:
    """Append one event with wall-clock time and machine-wide monotonic time, in seconds."""
    line = json.dumps({"event": event, **facts, "monotonic": time.monotonic(), "wall": time.time()})
    append_line(path, line)


def read_events(path: Path) -> list[dict[str, Any]]:
    """All events in order. Skips lines that are no JSON objects: a killed writer leaves incomplete ones."""
    events = []
    for line in read_bytes(path).split(b"\n"):
        try:
            event = parse_json(line)
        except ValueError:
            continue
        events += [event] if isinstance(event, dict) else []
    return events


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

    def engine_changed(self, index: int, is_back: bool) -> None:
        """Append that an engine of engine.urls was left out, or is back."""
        self.event("engine_taken_back" if is_back else "engine_left_out", engine=index)


def prompt_history(plan: RunPlan) -> PromptHistory | None:
    """What chooses the prompts of a run by earlier steps; None: prompt_order.py does by step alone."""
    config = plan.config
    if not config.data.uses_history:
        return None
    per_step, path = config.rollout.prompts_per_step, plan.run.prompt_history_path
    return PromptHistory(plan.train, config.data, per_step, config.seed, path, plan.mixed)


@dataclass(frozen=True, slots=True, kw_only=True)
class Session:
    """Plan, engines, rollout source and progress. run_session.py creates and closes them."""

    plan: RunPlan
    engines: EnginePool
    source: RolloutSource
    judge: Judge | None = None
    """The one that `source` asks."""
    teacher: TeacherServer | None = None
    """Scores what `source` sampled, if the teacher is on a server."""
    history: PromptHistory | None = None
    """Chooses the prompts, where they depend on earlier steps."""
    progress: Progress
    watches: Sequence[StepWatch] = ()
    owner: str = ""
    """Of its adapters, on engines that it shares with other runs."""

    @property
    def adapters(self) -> Path:
        """The folder into which the trainer publishes adapters."""
        return self.plan.resolved.identity.lora_sync_path

    def adapter(self, version: int) -> AdapterVersion:
        """An adapter version, published or not yet."""
        return AdapterVersion(version, self.adapters / adapter_name(version), self.owner)
