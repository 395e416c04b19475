"""The result of a run in a few facts: for `runs`, and the head of the report."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from skylite.errors import SkyliteError, error_line
from skylite.report.alarms import find_alarms, window
from skylite.report.read_run import RunFacts, age_s, number

Facts = dict[str, Any]


def summary(facts: RunFacts, repetition: Mapping[int, float] | None = None) -> Facts:
    """Settings, progress, results and findings as JSON values; null where a run has none.

    `repetition`: of the steps whose tokens were read.
    """
    config, status = facts.run.config, facts.status
    first, last = _ends(facts.series("reward/mean"))
    speeds = [x for x in facts.series("perf/completion_tokens_per_s") if math.isfinite(x)]
    held_out = facts.held_out
    newest = facts.metrics[-1] if facts.metrics else {}
    return {
        "name": facts.name,
        "path": str(facts.run.path),
        "phase": facts.state,
        "steps": facts.steps_done,
        "num_steps": config.num_steps,
        "model": config.model.name,
        "algorithm": config.algorithm.name,
        "rank": config.lora.rank,
        "seed": config.seed,
        "reward_first": _json_number(first),
        "reward_last": _json_number(last),
        "held_out_first": _score(held_out, 0),
        "held_out_last": _score(held_out, -1) if len(held_out) > 1 else None,
        "step_seconds": _json_number(facts.seconds),
        "tokens_per_second": _json_number(statistics.fmean(speeds)) if speeds else None,
        "peak_memory_bytes": _json_number(number(newest, "mem/rss_peak_bytes")),
        "peak_gpu_memory_bytes": _json_number(number(newest, "mem/gpu_peak_bytes")),
        "adapter_version": None if status is None else status.adapter_version,
        "adapter_verified": None if status is None else status.adapter_verified,
        "too_small_to_tell": [int(m["step"]) for m in facts.metrics if number(m, "canary/verified") == 0],
        "updated_at": None if status is None else status.updated_at,
        "age_seconds": None if status is None else _json_number(age_s(status)),
        "error": None if status is None else status.error,
        "alarms": [
            {"kind": a.kind, "is_alarm": a.is_alarm, "since": a.since, "text": a.text}
            for a in find_alarms(facts.metrics, facts.held_out, repetition)
        ],
        "unreadable": list(facts.unreadable),
    }


def damaged(name: str, path: str, error: Exception) -> Facts:
    """The facts of a run that cannot be read at all."""
    what = error.what if isinstance(error, SkyliteError) else f"It cannot be read: {error_line(error)}."
    return {"name": name, "path": path, "phase": "damaged", "unreadable": [what]}


def _ends(values: list[float]) -> tuple[float, float]:
    """Means over the first and the last steps: single steps are noise."""
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return math.nan, math.nan
    width = min(window(len(finite)), len(finite))
    return statistics.fmean(finite[:width]), statistics.fmean(finite[-width:])


def _score(held_out: Any, index: int) -> Facts | None:
    if not held_out:
        return None
    score = held_out[index].score
    numbers = {k: _json_number(v) for k, v in asdict(score).items()}
    return {"version": held_out[index].version, "name": score.name, **numbers}


def _json_number(value: float) -> float | None:
    return value if math.isfinite(value) else None
