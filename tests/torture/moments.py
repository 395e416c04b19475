"""The phases of a step, recognised from files of the run."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from pathlib import Path

from skylite.run.files import TEMPORARY_MARK
from skylite.run.run_dir import RunDir, adapter_name

PHASES = ("sampling", "scoring", "rollout write", "train", "publish", "published", "load", "checkpoint")
CHECKPOINT_EVERY = 2


def until(is_now: Callable[[], bool], timeout_s: float, every_s: float = 0.02) -> bool:
    """Wait; False after `timeout_s`. Time in which this process itself was stopped does not count."""
    last = time.monotonic()
    while not is_now():
        time.sleep(every_s)
        now = time.monotonic()
        timeout_s, last = timeout_s - min(now - last, every_s + 1.0), now
        if timeout_s < 0:
            return False
    return True


def step_for(phase: str, after: int) -> int:
    """The next step that has not begun by step `after + 1`; one with a checkpoint for that phase."""
    step = after + 2
    return step + step % CHECKPOINT_EVERY if phase == "checkpoint" else step


def moment(run: RunDir, scored: Path, phase: str, step: int) -> Callable[[], bool]:
    """A function that returns whether this phase of this step has begun."""
    base: list[int] = []

    def scoring() -> bool:
        if not base and phase_is(run, "sampling", step):
            base.append(size(scored))
        return bool(base) and size(scored) > base[0]

    return {
        "sampling": lambda: phase_is(run, "sampling", step),
        "scoring": scoring,
        "rollout write": lambda: is_written(run.rollouts, run.rollout_path(step).name),
        "train": run.rollout_path(step).exists,
        "publish": lambda: is_written(run.default_adapters, adapter_name(step)),
        "published": (run.default_adapters / adapter_name(step)).exists,
        "load": run.trainer_step_path(step).exists,
        "checkpoint": lambda: is_written(run.checkpoints, run.checkpoint_path(step).name),
    }[phase]


def hit(run: RunDir, phase: str, step: int) -> bool:
    """Whether the phase still lasted when the signal was sent: a write had not been renamed yet."""
    final = {"rollout write": run.rollout_path(step), "checkpoint": run.checkpoint_path(step)}
    final |= {"publish": run.default_adapters / adapter_name(step)}
    return phase not in final or not final[phase].exists()


def is_written(folder: Path, name: str) -> bool:
    """Whether `name` is being written or was just written."""
    try:
        return any(
            n == name or (n.startswith(f".{name}") and TEMPORARY_MARK in n) for n in os.listdir(folder)
        )
    except FileNotFoundError:
        return False


def phase_is(run: RunDir, phase: str, step: int) -> bool:
    """Whether status.json shows this phase of this step."""
    try:
        status = json.loads(run.status_path.read_text())
    except (FileNotFoundError, ValueError):
        return False
    return bool(status["phase"] == phase and status["step"] == step)


def size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:
        return 0
