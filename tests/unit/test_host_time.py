"""benchmarks/host_time.py: gaps between kernels by hand, and the operations of a step on a CPU."""

from __future__ import annotations

import importlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

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


def test_a_gpus_kernels_waits_and_gaps_come_from_the_profilers_events(
    host_time: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def event(device: str, start: float, end: float, name: str) -> Any:
        return SimpleNamespace(
            device_type=f"DeviceType.{device}", time_range=SimpleNamespace(start=start, end=end), name=name
        )

    events = [
        event("CPU", 0, 4, "aten::mm"),
        event("CPU", 1, 3, "cudaLaunchKernel"),
        event("CPU", 50, 90, "Optimizer.step"),
        event("CPU", 200, 260, "cudaStreamSynchronize"),
        event("CPU", 199, 261, "aten::_local_scalar_dense"),
        event("CUDA", 10, 30, "gemm"),
        event("CUDA", 60, 100, "adam"),
        event("CUDA", 55, 105, "Optimizer.step"),
    ]
    profiler = MagicMock()
    profiler.return_value.__enter__.return_value.events.return_value = events
    monkeypatch.setattr("torch.profiler.profile", profiler)
    monkeypatch.setattr("torch.cuda.synchronize", lambda: None)
    row = host_time.on_the_gpu(lambda: None, top=3)
    assert (row["operations"], row["kernels"], row["items"]) == (2, 2, 1)
    assert (row["waits"], row["waited_ms"]) == ({"cudaStreamSynchronize": 1}, 0.06)
    assert (row["busy_ms"], row["idle_ms"]) == (0.06, 0.03), "an annotation is not a kernel"
    assert row["by_kernel"] == ["0.04 ms 1 adam", "0.02 ms 1 gemm"]
