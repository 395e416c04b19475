"""Fixtures that several end-to-end tests share."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from skylite.engine.server_command import ENGINE_COMMAND
from tests.e2e.project import Project, make_project
from tests.e2e.running import DEADLINE_S
from tests.torture.ground import FAKE_ENGINE_COMMAND, ROOT


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Project:
    """A prepared project. Each test chooses new names for its runs."""
    return make_project(tmp_path_factory.mktemp("project"), tiny_llama)


@pytest.fixture(scope="session")
def finished(project: Project) -> str:
    """Name of a run with two finished steps. Read only, except for `evals/`."""
    done = project.run(*project.train_args("finished", 2, "--set", "eval.limit=0"), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "skylite eval finished" in done.stderr
    return "finished"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's runs sample from tests/fakes/engine.py, which starts without vLLM's 20 s."""
    monkeypatch.setenv(ENGINE_COMMAND, FAKE_ENGINE_COMMAND)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])))
