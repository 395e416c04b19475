"""benchmarks/host_time.py: gaps between kernels by hand, and the operations of a step on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture
def host_time(monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    return importlib.import_module("host_time")


def test_busy_and_idle_time_of_overlapping_kernels(host_time: Any) -> None:
    kernels = [(0.0, 10.0, "a"), (5.0, 12.0, "b"), (20.0, 30.0, "c"), (22.0, 25.0, "d"), (230.0, 240.0, "e")]
    row = host_time.timeline(kernels)
    assert (row["span_ms"], row["busy_ms"], row["idle_ms"]) == (0.24, 0.03, 0.21)
    assert row["gaps"]["0 to 10 us"] == {"gaps": 1, "ms": 0.01}
    assert row["gaps"]["100 to 1000 us"] == {"gaps": 1, "ms": 0.2}
    assert row["longest_gaps"][0] == "0.20 ms at 0.0 ms, between c and e"


def test_operations_of_a_step_are_counted_by_the_line_that_calls_them(host_time: Any) -> None:
    words = ["--narrow", "--layers=2", "--groups=1", "--steps=1", "--top=1000"]
    row = host_time.measure(host_time.parse_arguments(words))
    counts = [int(place.split()[0]) for place in row["by_place"]]
    assert sum(counts) == row["operations"] == 2 * row["operations_per_layer"]
    (lora,) = (place for place in row["by_place"] if "addmm_ lora_linear.py" in place and "forward" in place)
    assert lora.startswith("14 "), "seven adapted matrices in each of two layers"
