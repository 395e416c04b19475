"""Addresses of servers, and bounded connections to them."""

from __future__ import annotations

import asyncio
import os
import select
import ssl
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpcore
import httpx

from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, EngineFailed
from skylite.notes import Note, warning

UNIX = "unix:"
KEY_VARIABLE = "SKYLITE_API_KEY"
"""Environment variable with a server's token: users choose it there, and a server of ours reads it there. An
argument would be visible in the process list."""
HEADER_BYTES = 64 << 10
"""Largest request line with its headers that a server of ours takes."""
MAX_CONNECTIONS = 128
"""The default of engine.max_num_seqs: more would only wait in the server."""
STATUS_CONNECTIONS = 4
"""For health, metrics and adapters, which must not wait behind prompts."""
STATUS_TIMEOUT_S = 5.0
"""For requests that a server answers without its engine."""
LOOPBACK = ("localhost", "127.0.0.1", "::1")
OTHER_FILES = 256
"""Logs, pipes, libraries and sockets of a process besides its connections; generous."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server is: `unix:/path`, or http(s)://host:port with the token that it asks for."""

    url: str
    token: str | None = field(default=None, repr=False)
    ca_file: str = ""
    """Certificates that sign the server's, in PEM. Empty: the usual authorities."""

    @classmethod
    def of_socket(cls, path: Path) -> Address:
        return cls(f"{UNIX}{path}")

    @classmethod
    def parse(cls, url: str, token: str | None = None, ca_file: str = "") -> Address:
        """An address that a user typed, with or without /v1. Raises ConfigError."""
        try:
            parsed = httpx.URL(url.rstrip("/").removesuffix("/v1"))
        except httpx.InvalidURL:
            parsed = httpx.URL("")
        if parsed.scheme not in ("http", "https") or not parsed.host:
            raise ConfigError(f"{url} is not the URL of a server.", "Write it like http://127.0.0.1:8000.")
        return cls(str(parsed), token, ca_file)

    @property
    def socket(self) -> Path | None:
        """The path of a Unix socket; None for http."""
        return Path(self.url.removeprefix(UNIX)) if self.url.startswith(UNIX) else None

    @property
    def base_url(self) -> str:
        """For an HTTP client, which takes a socket beside it."""
        return "http://engine" if self.socket is not None else self.url

    @property
    def verify(self) -> ssl.SSLContext | bool:
        """How an HTTP client verifies the server. Raises ConfigError for a useless `ca_file`."""
        if not self.ca_file:
            return True
        try:
            return ssl.create_default_context(cafile=self.ca_file)
        except OSError as error:  # SSLError too
            raise ConfigError(
                f"engine.ca_file={self.ca_file} holds no certificates: {error}.", "Name a PEM file."
            ) from None

    @property
    def headers(self) -> dict[str, str]:
        return {"Authorization": f"Bearer {self.token}"} if self.token else {}

    def client(self, timeout_s: float, *, proxies: bool = True) -> httpx.Client:
        """A blocking client, for one person at a terminal. `proxies`: use those of the environment."""
        return httpx.Client(
            transport=None if self.socket is None else httpx.HTTPTransport(uds=str(self.socket)),
            verify=self.verify,
            base_url=self.base_url,
            headers=self.headers,
            timeout=timeout_s,
            trust_env=proxies,
        )


def api_key(setting: str, variable: str, name: str) -> str | None:
    """The key in the variable that a setting names; None if it names none. Raises ConfigError.

    `name`: what the server is called, such as `judge j at http://...`.
    """
    if not variable:
        return None
    key = os.environ.get(variable, "").strip()
    if not key:
        raise ConfigError(
            f"{setting}={variable} names a variable that is not set, so the {name} would get no key.",
            f"Export {variable}, or leave the setting out for a {name.split()[0]} without keys.",
        )
    return key


def readable_by_others(setting: str, url: str, key_env: str, what: str = "texts") -> Note | None:
    """A warning if `what` goes to a server can be read on its way. `key_env`: the variable with its key."""
    parts = httpx.URL(url)
    if parts.scheme != "http" or parts.host in LOOPBACK:
        return None
    sent = f"{what} and the key" if key_env else what
    return warning(f"{setting}={url} has no TLS: {sent} are readable on the way")


def open_files(config: TrainConfig) -> int:
    """Files that the parent, and each engine, may have open at once."""
    engine = config.engine
    return OTHER_FILES + engine.count * (engine.max_num_seqs + STATUS_CONNECTIONS)


class Connections:
    """Connections of one client: a bounded number, whatever the number of prompts. Close with `aclose`."""

    def __init__(self, name: str, address: Address, max_connections: int = MAX_CONNECTIONS) -> None:
        self.name = name
        # Requests wait at the semaphore: httpx's own queue takes quadratic time.
        self._slots = asyncio.Semaphore(max_connections)
        self._prompts = _connect(address, max_connections)
        self._status = _connect(address, STATUS_CONNECTIONS)

    async def aclose(self) -> None:
        await self._prompts.aclose()
        await self._status.aclose()

    async def send_prompt(self, path: str, body: dict[str, Any], timeout_s: float) -> httpx.Response:
        """POST work for the engine, when a connection is free. Raises EngineFailed."""
        async with _deadline(self.name, path, timeout_s), self._slots:
            if self._prompts.is_closed:  # while this one waited
                raise EngineFailed(f"The connections to {self.name} are closed.")
            return await self._prompts.post(path, json=body)

    async def send(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout_s: float = STATUS_TIMEOUT_S,
        **more: Any,
    ) -> httpx.Response:
        """Send a request that does not wait behind prompts. Raises EngineFailed. `more`: more of httpx's."""
        async with _deadline(self.name, path, timeout_s):
            return await self._status.request(method, path, json=body, **more)


@asynccontextmanager
async def _deadline(name: str, path: str, timeout_s: float) -> AsyncIterator[None]:
    """End a request, its complete reply included, after `timeout_s`. Raises EngineFailed for all errors."""
    try:
        async with asyncio.timeout(timeout_s):
            yield
    except TimeoutError:
        raise EngineFailed(f"{name} did not answer {path} within {timeout_s:g} s.") from None
    except (httpx.TransportError, httpx.DecodingError) as error:
        raise EngineFailed(
            f"{name} sent no complete reply to {path}: {type(error).__name__} {error}".rstrip(" .") + "."
        ) from None


def _connect(address: Address, count: int) -> httpx.AsyncClient:
    limits = httpx.Limits(max_connections=count, max_keepalive_connections=count)
    transport = (
        httpx.AsyncHTTPTransport(verify=address.verify, limits=limits)
        if address.socket is None
        else _UnixSocketTransport(str(address.socket), limits)
    )
    # httpx's timeouts count per read, so a slow trickle never expires. `_deadline` covers the whole reply.
    return httpx.AsyncClient(
        transport=transport, base_url=address.base_url, headers=address.headers, timeout=None
    )


class _UnixSocketTransport(httpx.AsyncHTTPTransport):
    """HTTP over a Unix socket on asyncio's streams.

    httpx uses anyio, whose Unix sockets print "Exception in callback Future.set_result(None)" where a request
    is cancelled in the moment its reply arrives, as a stop or a timeout does.
    """

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
