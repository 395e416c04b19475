"""Fixtures that several end-to-end tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.project import WITH_FAKE_ENGINE, Project, make_project
from tests.e2e.running import DEADLINE_S


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Project:
    """A prepared project. Each test chooses new names for its runs."""
    return make_project(tmp_path_factory.mktemp("project"), tiny_llama)


EXACT = (
    "trainer.deterministic=true",
    "engine.max_num_seqs=1",
    "eval.limit=0",
    "checkpoint.every=2",
    "checkpoint.keep_last=3",
)
"""Settings of a run that is bit for bit equal when it is resumed.

With one request at a time, vLLM's numbers do not depend on earlier requests.
"""


@pytest.fixture(scope="session")
def finished(project: Project) -> str:
    """Name of a run with three finished steps under EXACT. Read only, except for `evals/`."""
    settings = [word for setting in EXACT for word in ("--set", setting)]
    done = project.run(*project.train_args("finished", 3, *settings), timeout_s=DEADLINE_S)
    assert done.returncode == 0, done.stderr
    assert "skylite eval finished" in done.stderr
    return "finished"


@pytest.fixture
def fake_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test's runs sample from tests/fakes/launcher.py, which starts without vLLM's 20 s."""
    monkeypatch.setenv(WITH_FAKE_ENGINE, "1")
