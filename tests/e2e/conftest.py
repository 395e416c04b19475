"""One project for the whole session."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.e2e.project import Project, make_project


@pytest.fixture(scope="session")
def project(tmp_path_factory: pytest.TempPathFactory, tiny_llama: Path) -> Project:
    """A prepared project; tests choose run folders of their own."""
    return make_project(tmp_path_factory.mktemp("project"), tiny_llama)
