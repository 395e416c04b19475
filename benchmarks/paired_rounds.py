"""Measure a special path switched on and off in turns."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

from switched_off import PATHS, SWITCH, SpecialPath

MODEL, NUM_PROMPTS, GROUP_SIZE, PROMPT_TOKENS, MAX_TOKENS = "smollm2-135m", 4, 8, 106, 128
Figures = dict[str, float]
Measure = Callable[[bool], Figures]
"""Figures with the path off (True) or on."""


def in_turns(measure: Measure, rounds: int) -> dict[str, Any]:
    """Medians, ratios and rounds of every figure. The order of the sides alternates."""
    rows: dict[bool, list[Figures]] = {False: [], True: []}
    for index in range(rounds):
        for off in (index % 2 == 1, index % 2 == 0):
            rows[off].append(measure(off))
    result = {}
    for unit in rows[False][0]:
        on, off_ = (statistics.median(row[unit] for row in rows[side]) for side in (False, True))
        sides = {"on": [r[unit] for r in rows[False]], "off": [r[unit] for r in rows[True]]}
        result[unit] = {"on": on, "off": off_, "ratio": round(off_ / on, 3), "rounds": sides}
    return result


def variables(name: str, path: SpecialPath, off: bool) -> tuple[dict[str, str], list[str]]:
    """Environment and flags of a side."""
    names = [path.without] * bool(path.without) + [name] * off
    env = {key: value for n in names for key, value in PATHS[n].env}
    return env | {SWITCH: "+".join(names)}, [flag for n in names for flag in PATHS[n].flags]
