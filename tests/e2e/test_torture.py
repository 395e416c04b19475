"""A few of the cases of `make torture`: a run that is killed and resumed equals an undisturbed one."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.torture.cases import Case
from tests.torture.ground import SETTINGS, Ground, make_ground
from tests.torture.kills import torture, undisturbed

pytestmark = [pytest.mark.e2e, pytest.mark.dist]
CASES = [
    Case("engine", "sampling", "KILL"),
    Case("rank-0", "publish", "KILL"),
    Case("engine", "load", "STOP"),
    Case("reaper-engine", "published", "STOP"),
    Case("reaper-trainer", "checkpoint", "STOP+KILL"),
]


@pytest.fixture(scope="module")
def ground(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Ground:
    return make_ground(tmp_path_factory.mktemp("torture"), tiny_llama, "fake", 1, SETTINGS)


def test_a_run_that_is_killed_and_resumed_equals_an_undisturbed_one(ground: Ground) -> None:
    expected, _ = undisturbed(ground)
    results = [
        result for of_round in torture(ground, CASES, expected, time.monotonic() + 400) for result in of_round
    ]
    assert {r.case for r in results} == set(CASES)
    for result in results:
        assert result.well, result
