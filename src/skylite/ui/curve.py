"""Curves and bars drawn with text characters."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise

BLOCKS = " ▁▂▃▄▅▆▇█"


def resample(values: Sequence[float], width: int) -> list[float]:
    """At most `width` values: means over equal stretches of the series."""
    n = len(values)
    if n <= width:
        return list(values)
    edges = [n * k // width for k in range(width + 1)]
    return [math.fsum(values[a:b]) / (b - a) for a, b in pairwise(edges)]


def curve(
    values: Sequence[float], width: int, height: int, scale: tuple[float, float] | None = None
) -> list[str]:
    """`height` lines, top first, of at most `width` columns. The scale covers `scale` and all values;
    None: from the lowest to the highest value.

    The lowest value shows the thinnest bar, so a zero differs from a missing step; nan is blank.
    """
    finite = [v for v in values if math.isfinite(v)]
    covered = [*finite, *(scale or ())] or [0.0]
    low, high = min(covered), max(covered)
    if low == high:  # one value, or equal ones: in the middle
        low, high = low - 1, high + 1
    span = high - low
    levels = [
        max(1, round(8 * height * (v - low) / span)) if math.isfinite(v) else 0
        for v in resample(values, width)
    ]
    return [
        "".join(BLOCKS[min(8, max(0, level - 8 * row))] for level in levels)
        for row in range(height - 1, -1, -1)
    ]


def proportional_widths(parts: Sequence[float], width: int) -> list[int]:
    """Integers proportional to `parts` that sum to `width` (largest remainder method)."""
    total = math.fsum(parts)
    if not total > 0:
        return [0] * len(parts)
    exact = [width * p / total for p in parts]
    widths = [int(x) for x in exact]
    for k in sorted(range(len(parts)), key=lambda k: widths[k] - exact[k])[: width - sum(widths)]:
        widths[k] += 1
    return widths
