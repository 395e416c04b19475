"""Connections to a vLLM server: a bounded number, whatever the number of prompts."""

from __future__ import annotations

from pathlib import Path

import httpx

from skylite.config.train import TrainConfig
from skylite.engine.unix_sockets import UnixSocketTransport

MAX_CONNECTIONS = 128
"""The default of engine.max_num_seqs: more would only wait in the server."""
STATUS_CONNECTIONS = 4
"""For health, metrics and adapters, which must not wait behind prompts."""
OTHER_FILES = 256
"""Logs, pipes, libraries and sockets of a process besides its connections; generous."""


def open_files(config: TrainConfig) -> int:
    """Files that the parent, and each engine, may have open at once."""
    engine = config.engine
    return OTHER_FILES + engine.num_engines * (engine.max_num_seqs + STATUS_CONNECTIONS)


def connect(socket_path: Path, count: int) -> httpx.AsyncClient:
    """A client with at most `count` connections."""
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    transport = UnixSocketTransport(str(socket_path), limits)
    # httpx's timeouts count per read, so a slow trickle never expires. `_send` has a deadline per reply.
    return httpx.AsyncClient(transport=transport, base_url="http://engine", timeout=None)
