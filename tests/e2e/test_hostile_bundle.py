"""A hostile bundle whose trainer and engine really start: the other commands are in tests/unit."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.hostile_bundle import opened_bundle
from tests.unit.bad_inputs import call

pytestmark = [pytest.mark.e2e, pytest.mark.dist]


@pytest.mark.usefixtures("fake_engine")
def test_replay_and_eval_of_a_run_run_no_code_of_its_model_and_adapters(
    tmp_path: Path, tiny_llama: Path
) -> None:
    with opened_bundle(tmp_path, tiny_llama):
        replayed = call(["replay", "run-files", "--step", "1"])
        assert replayed.code == 1, replayed.output
        assert "different: step 1 again" in replayed.output
        evaluated = call(["eval", "run-files", "--data", "data"])
        assert evaluated.code == 2, evaluated.output
        assert "raised SecurityError" in evaluated.output, "its chat template, in the sandbox"
