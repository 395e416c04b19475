"""HTTP over a Unix socket for httpx, on asyncio's streams.

httpx uses anyio. Its Unix sockets print "Exception in callback Future.set_result(None)" where a request is
cancelled in the moment its reply arrives, as a stop or a timeout does.
"""

from __future__ import annotations

import asyncio
import select
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import httpcore
import httpx


class UnixSocketTransport(httpx.AsyncHTTPTransport):
    """Connections to one Unix socket. They have no timeouts: give each request a deadline."""

    def __init__(self, path: str, limits: httpx.Limits) -> None:
        self._pool = httpcore.AsyncConnectionPool(
            max_connections=limits.max_connections,
            max_keepalive_connections=limits.max_keepalive_connections,
            keepalive_expiry=limits.keepalive_expiry,
            uds=path,
            network_backend=_Sockets(),
        )


class _Sockets(httpcore.AsyncNetworkBackend):
    async def connect_unix_socket(
        self, path: str, timeout: float | None = None, socket_options: Iterable[Any] | None = None
    ) -> httpcore.AsyncNetworkStream:
        with _os_errors_as(httpcore.ConnectError):
            return _Stream(*await asyncio.open_unix_connection(path))


@dataclass(frozen=True, slots=True)
class _Stream(httpcore.AsyncNetworkStream):
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        with _os_errors_as(httpcore.ReadError):
            return await self.reader.read(max_bytes)

    async def write(self, buffer: bytes, timeout: float | None = None) -> None:
        with _os_errors_as(httpcore.WriteError):
            self.writer.write(buffer)
            await self.writer.drain()

    async def aclose(self) -> None:
        # At once: the server may read no more, and nothing is left to send after a complete reply.
        self.writer.transport.abort()

    def get_extra_info(self, info: str) -> Any:
        return self._has_ended() if info == "is_readable" else None

    def _has_ended(self) -> bool:
        """Whether the server closed an idle connection."""
        if self.writer.is_closing() or self.reader.at_eof():
            return True
        poll = select.poll()
        poll.register(self.writer.get_extra_info("socket"), select.POLLIN)
        return bool(poll.poll(0))


@contextmanager
def _os_errors_as(kind: type[Exception]) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise kind(error) from error
