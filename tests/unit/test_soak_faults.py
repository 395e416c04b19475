"""The leaks that `make torture` reports."""

from __future__ import annotations

from typing import Any

import pytest

from tests.torture.soak import soak_faults


def soak_run(**changed: Any) -> dict[str, Any]:
    row = {"from_step": 0, "to_step": 300, "rss_kib_per_step": 8.0, "descriptors_per_step": 0.0}
    run: dict[str, Any] = {"steps": 300, "adapters_left": [0, 298, 299, 300], "processes": {"parent": [row]}}
    for name, value in changed.items():
        (run if name in run else row)[name] = value
    return run


def test_a_run_with_constant_memory_has_no_leak() -> None:
    assert soak_faults(soak_run(), kept=3) == []


@pytest.mark.parametrize(
    ("changed", "fault"),
    [
        ({"rss_kib_per_step": 500.0}, "parent: 500.0 KiB per step"),
        ({"descriptors_per_step": 1.0}, "parent: 1.0 descriptors per step"),
        ({"adapters_left": [0, 297, 298, 299, 300]}, "adapters of versions [297] are still there"),
    ],
)
def test_growth_and_old_adapters_are_reported(changed: dict[str, Any], fault: str) -> None:
    assert soak_faults(soak_run(**changed), kept=3) == [fault]


def test_growth_of_a_short_lived_process_is_no_leak() -> None:
    assert soak_faults(soak_run(to_step=50, rss_kib_per_step=500.0), kept=3) == []
