"""When a signal is sent: the phases of a step, each told from what is on the disk."""

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
    """Wait. Only time in which this process ran counts, so that one that was stopped and continued does not take it for a hang."""
    last = time.monotonic()
    while not is_now():
        time.sleep(every_s)
        now = time.monotonic()
        timeout_s, last = timeout_s - min(now - last, every_s + 1.0), now
        if timeout_s < 0:
            return False
    return True


def step_for(phase: str, after: int) -> int:
    """A step that begins after step `after + 1`, and has a checkpoint where that is asked for."""
    step = after + 2
    return step + step % CHECKPOINT_EVERY if phase == "checkpoint" else step


def moment(run: RunDir, scored: Path, phase: str, step: int) -> Callable[[], bool]:
    """Whether that phase of that step has come."""
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
    """Whether the phase was still there when the signal had been sent: for a write, whether it was before the rename."""
    final = {"rollout write": run.rollout_path(step), "checkpoint": run.checkpoint_path(step)}
    final |= {"publish": run.default_adapters / adapter_name(step)}
    return phase not in final or not final[phase].exists()


def is_written(folder: Path, name: str) -> bool:
    """Whether `name` is being written, or has just been."""
    try:
        return any(
            n == name or (n.startswith(f".{name}") and TEMPORARY_MARK in n) for n in os.listdir(folder)
        )
    except FileNotFoundError:
        return False


def phase_is(run: RunDir, phase: str, step: int) -> bool:
    """What status.json says; a status that is not there yet says nothing."""
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
