"""The remembered start time of an engine: vLLM's is kept, a stand-in's is not."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from skylite.engine.vllm.server_command import ENGINE_COMMAND
from skylite.engine.vllm.startup_progress import engine_starting
from skylite.processes.child import ProcessSpec, kill, start
from skylite.run.remembered_durations import remember_s, remembered_s
from tests.unit.test_engine_server import SPEC

KEY = "start cpu model"


@pytest.mark.parametrize("stand_in", [True, False])
def test_a_stand_in_does_not_overwrite_vllms_start_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, stand_in: bool
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    remember_s(KEY, 31.5)
    if stand_in:
        monkeypatch.setenv(ENGINE_COMMAND, "fake")
    else:
        monkeypatch.delenv(ENGINE_COMMAND, raising=False)
    log_path = tmp_path / "engine.log"
    child = start(ProcessSpec(name="vllm-0", argv=[sys.executable, "-c", ""], env={}, log_path=log_path))
    try:
        with engine_starting(SPEC, child):
            pass
    finally:
        kill(child)
    assert (remembered_s(KEY) == 31.5) is stand_in
