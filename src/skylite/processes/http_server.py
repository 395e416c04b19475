"""Serves an app over HTTP in this process, for as long as a block runs."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import uvicorn


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Leave signals to the command."""
        yield


@contextlib.asynccontextmanager
async def serving(app: Any, sockets: Sequence[socket.socket], **options: Any) -> AsyncIterator[None]:
    """Serve an ASGI app on these sockets. `options`: more of uvicorn's.

    There is no access log, no lifespan, and no WebSocket.
    """
    server = _Server(
        uvicorn.Config(app, log_config=None, access_log=False, lifespan="off", ws="none", **options)
    )
    task = asyncio.ensure_future(server.serve(sockets=list(sockets)))
    try:
        while not server.started and not task.done():
            await asyncio.sleep(0.01)
        yield
    finally:
        server.should_exit = server.force_exit = True
        await asyncio.gather(task, return_exceptions=True)
