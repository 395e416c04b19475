"""A long run of a tiny model with regular engine kills: memory and file descriptors must not grow."""

from __future__ import annotations

import contextlib
import statistics
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import psutil

from tests.torture.evidence import digests, last_finished, torn
from tests.torture.ground import Ground, Started, victims

SAMPLE_S = 0.5
MIN_STEPS = 10
LONG = 100
"""Steps. Processes that live shorter still allocate what they need once."""
FLAT_KIB = 64.0
"""Allowed growth of resident memory per step. A leaked adapter or group of completions is many times that."""
FLAT_DESCRIPTORS = 0.1
"""Allowed growth of open file descriptors per step."""


@dataclass(slots=True)
class Life:
    """Samples of one process."""

    kind: str
    steps: list[int] = field(default_factory=list)
    rss_kib: list[float] = field(default_factory=list)
    descriptors: list[int] = field(default_factory=list)


def soak(ground: Ground, name: str, steps: int, restart_every: int, timeout_s: float) -> dict[str, Any]:
    """Run and resume until `steps` are done or the time is over; returns a row of the results file.

    `restart_every`: steps between kills of the engine.
    """
    run, lives, began = ground.run(name), dict[psutil.Process, Life](), time.monotonic()
    engine_kills = resumes = 0
    started = ground.start(name, steps=steps)
    try:
        while time.monotonic() - began < timeout_s:
            if started.process.poll() == 0:
                break
            if started.process.poll() is not None:
                resumes += 1
                started = ground.start(name, resume=run.config_path.exists())
            done = last_finished(run)
            found = measure(started, done, lives)
            if done >= (engine_kills + 1) * restart_every and done < steps and "engine" in found:
                found["engine"].kill()
                engine_kills += 1
            time.sleep(SAMPLE_S)
    finally:
        started.kill_all()
    return {
        "engine": ground.engine,
        "steps": last_finished(run),
        "of": steps,
        "engine_kills": engine_kills,
        "resumes": resumes,
        "seconds": round(time.monotonic() - began),
        "adapters_left": sorted(digests(run)),
        "torn": torn(run),
        "processes": table(lives),
    }


def measure(started: Started, step: int, lives: dict[psutil.Process, Life]) -> dict[str, psutil.Process]:
    """Sample every process of the run; returns the processes by kind."""
    found = victims(started)
    for kind, process in found.items():
        with contextlib.suppress(psutil.Error):
            rss, descriptors = process.memory_info().rss / 1024, process.num_fds()
            life = lives.setdefault(process, Life(kind))
            life.steps.append(step)
            life.rss_kib.append(rss)
            life.descriptors.append(descriptors)
    return found


def table(lives: dict[psutil.Process, Life]) -> dict[str, list[dict[str, float]]]:
    """Summaries by kind of the processes seen over at least MIN_STEPS steps."""
    found = defaultdict[str, list[dict[str, float]]](list)
    for life in lives.values():
        if life.steps[-1] - life.steps[0] >= MIN_STEPS:
            found[life.kind].append(figures(life))
    return dict(sorted(found.items()))


def soak_faults(run: dict[str, Any], kept: int) -> list[str]:
    """Growth beyond the limits, and adapters that should be gone (version 0 and the last `kept` may stay)."""
    long = [
        (kind, row)
        for kind, rows in run["processes"].items()
        for row in rows
        if row["to_step"] - row["from_step"] >= LONG
    ]
    faults = [
        f"{kind}: {row['rss_kib_per_step']} KiB per step"
        for kind, row in long
        if row["rss_kib_per_step"] > FLAT_KIB
    ]
    faults += [
        f"{kind}: {row['descriptors_per_step']} descriptors per step"
        for kind, row in long
        if row["descriptors_per_step"] > FLAT_DESCRIPTORS
    ]
    too_old = [version for version in run["adapters_left"] if 0 < version <= run["steps"] - kept]
    return faults + ([f"adapters of versions {too_old} are still there"] if too_old else [])


def figures(life: Life) -> dict[str, float]:
    """Slopes over the second half of the samples, after one-time allocations."""
    half = len(life.steps) // 2
    steps, rss, descriptors = life.steps[half:], life.rss_kib[half:], life.descriptors[half:]
    return {
        "from_step": life.steps[0],
        "to_step": life.steps[-1],
        "samples": len(life.steps),
        "rss_mib_half": round(rss[0] / 1024, 1),
        "rss_mib_last": round(rss[-1] / 1024, 1),
        "rss_kib_per_step": round(slope(steps, rss), 2),
        "descriptors_half": descriptors[0],
        "descriptors_last": descriptors[-1],
        "descriptors_per_step": round(slope(steps, descriptors), 4),
    }


def slope(x: Sequence[float], y: Sequence[float]) -> float:
    """Least squares slope, 0 if x does not change."""
    return statistics.linear_regression(x, y).slope if len(set(x)) > 1 else 0.0
