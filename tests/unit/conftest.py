"""Fixtures that several unit tests share."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.unit.gpu_cases import Machine


@pytest.fixture
def machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Machine:
    """A machine without GPUs, until the test gives it some."""
    return Machine(tmp_path / "bin", monkeypatch)
