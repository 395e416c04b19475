"""The trainer of a sweep: it trains several runs on one base, whichever has rollouts first.

Consumes: the parent's orders, and the files of each run that has joined. Waits for: the next order, rollout
file or stop request. Produces: for each run what its own trainer would. Unblocks: the parents of the runs.
"""

from __future__ import annotations

import os
import sys
import time
import traceback
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from skylite.config.loading import read_run_config
from skylite.errors import SkyliteError, TrainingDiverged, WriteFailed
from skylite.model.process_group import Dist
from skylite.run.rollout_file import read_examples
from skylite.run.run_dir import RunDir
from skylite.run.sweep_dir import SweepDir
from skylite.trainer.canary import wait_for_canary
from skylite.trainer.loop import Training, begin_training, end_training, take_step
from skylite.trainer.micro_batch_memory import free_memory
from skylite.trainer.shared_base import SharedBase, load_shared_base
from skylite.types import TrainingExample

Report = Callable[[RunDir, BaseException], None]
"""Writes the error of a run for its parent."""


@dataclass(frozen=True, slots=True)
class Order:
    """What the ranks do next."""

    kind: Literal["join", "train", "leave", "end"]
    name: str = ""
    """Of the run."""
    resume: bool = False
    root: str = ""


@dataclass(slots=True)
class Served:
    """The base, once the first run has named it, and the runs that have joined."""

    sweep: SweepDir
    dist: Dist
    report: Report
    base: SharedBase | None = None
    runs: dict[str, Training] = field(default_factory=dict)


def serve_runs(sweep: SweepDir, dist: Dist, report: Report) -> None:
    """Train every run that joins until it is done, fails or is stopped; end on a stop request of the sweep.

    A run that fails leaves, and the others go on. With several ranks only a failure that all ranks share does
    so; any other ends the trainer.
    """
    served = Served(sweep, dist, report)
    idle_since = time.monotonic()
    while True:
        order = Order(**dist.wait_for(lambda: _next_order(served)))
        if order.kind == "end":
            break
        try:
            _obey(served, order, idle_since)
        except Exception as error:
            if dist.dp_size > 1 and not isinstance(error, TrainingDiverged):
                raise
            if not isinstance(error, SkyliteError):
                traceback.print_exc(file=sys.stderr)
            # Outside of `_obey`, whose frames hold tensors.
            report(_run_of(served, order), error.with_traceback(None))
            _drop(served, order.name)
        idle_since = time.monotonic()
    for name in list(served.runs):
        end_training(served.runs[name])
        _drop(served, name)


def _next_order(served: Served) -> dict[str, Any] | None:
    """What to do next, or None. Rank 0 asks. Of several rollout files the oldest comes first."""
    sweep = served.sweep
    if sweep.shared.stop_path.exists():
        return {"kind": "end"}
    for path in sorted(sweep.orders.glob("*.json")):
        order = sweep.shared.read_json(path)
        if RunDir(Path(str(order["root"]))).canary_path.exists():
            return {"kind": "join", "name": path.stem, "root": order["root"], "resume": order["resume"]}
    waiting: list[tuple[int, str]] = []
    for name, training in served.runs.items():
        run = training.state.run
        if training.is_complete or run.stop_path.exists():
            return {"kind": "leave", "name": name}
        path = run.rollout_path(training.done + 1)
        with suppress(FileNotFoundError):
            waiting.append((path.stat().st_mtime_ns, name))
    return {"kind": "train", "name": min(waiting)[1]} if waiting else None


def _obey(served: Served, order: Order, idle_since: float) -> None:
    if order.kind == "join":
        _join(served, order)
    elif order.kind == "train":
        training = served.runs[order.name]
        take_step(training, _examples(served, training), idle_since)
    else:
        end_training(served.runs[order.name])
        _drop(served, order.name)


def _join(served: Served, order: Order) -> None:
    """Add a run's policy to the base, or resume it. The first run names the base."""
    dist, run = served.dist, RunDir(Path(order.root))
    if dist.is_main:
        (served.sweep.orders / f"{order.name}.json").unlink()
    if order.name in served.runs:  # its parent has started again
        _forget(served, order.name)
    run_config = read_run_config(run.config_path)
    if served.base is None:
        probe = max(wait_for_canary(run, dist)[0], key=len)
        served.base = load_shared_base(run_config.resolved, run_config.config, probe, dist)
    served.runs[order.name] = begin_training(run, run_config, dist, order.resume, served.base)


def _examples(served: Served, training: Training) -> list[TrainingExample]:
    path = training.state.run.rollout_path(training.done + 1)
    return served.dist.share(read_examples(path) if served.dist.is_main else None) or []


def _run_of(served: Served, order: Order) -> RunDir:
    return RunDir(Path(order.root)) if order.root else served.sweep.run(order.name)


def _forget(served: Served, name: str) -> None:
    """Free the policy's parameters, gradients and moments."""
    served.runs.pop(name, None)
    if served.base is not None and name in served.base.trainers:
        served.base.remove_policy(name)
    free_memory()


def _drop(served: Served, name: str) -> None:
    """Forget a run, and tell its parent."""
    _forget(served, name)
    if served.dist.is_main:
        with suppress(WriteFailed):
            os.close(os.open(served.sweep.left / name, os.O_CREAT | os.O_WRONLY, 0o600))
