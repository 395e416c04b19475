"""Fixtures that several test files share."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from skylite.ui.logs import set_terminal_level
from tests.engines import EngineServer, running_server
from tests.tiny_models import make_tiny_model


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Groups for `--dist loadgroup`: a file, or all files whose tests share vLLM's server."""
    sharing = {i.path for i in items if isinstance(i, pytest.Function) and "vllm_server" in i.fixturenames}
    for item in items:
        group = "vllm_server" if item.path in sharing else item.path.stem
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def own_state(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """What skylite remembers about its user goes to a temporary folder."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        yield


@pytest.fixture(autouse=True)
def own_logging() -> Iterator[None]:
    """Info is logged, and the handlers of a command that a test runs in this process go with the test."""
    set_terminal_level(logging.INFO)
    yield
    logger = logging.getLogger("skylite")
    logger.handlers.clear()
    logger.propagate = True


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Folder of a tiny random Llama with a tokenizer. Read only."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "llama")


@pytest.fixture(scope="session")
def vllm_server(tiny_llama: Path) -> Iterator[EngineServer]:
    """One vLLM CPU server of the tiny Llama for the session.

    Give your adapters unique names: a name cannot be reused.
    """
    with running_server(tiny_llama) as server:
        yield server
