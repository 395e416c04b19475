"""When sampling and training ran, on the machine's monotonic clock: what overlapped, and what was neither."""

from __future__ import annotations

from collections.abc import Iterable

Span = tuple[float, float]
"""Start and end in seconds of time.monotonic(), which all processes of a machine share."""


def covered_s(window: Span, spans: Iterable[Span]) -> float:
    """Seconds of `window` in which at least one of `spans` ran."""
    total, reached = 0.0, window[0]
    for start, end in sorted(spans):
        start, end = max(start, reached), min(end, window[1])
        total += max(0.0, end - start)
        reached = max(reached, end)
    return total
