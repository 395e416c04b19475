"""The shared vLLM server, without adapters."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.engines import (
    EngineServer,
)


@pytest.fixture
def server(vllm_server: EngineServer) -> Iterator[EngineServer]:
    """The shared server, without adapters before and after."""
    yield vllm_server
    for model in vllm_server.http.get("/v1/models").json()["data"]:
        if model["id"] != vllm_server.base:
            vllm_server.unload(model["id"])
