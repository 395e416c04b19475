"""Sends adapters to the receiver beside an engine that does not see the run's folder (receiver.py)."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from skylite import __version__
from skylite.adapters.manifest import read_manifest
from skylite.engine.connections import STATUS_TIMEOUT_S, Address, Connections
from skylite.engine.interface import Engine
from skylite.engine.receiver import (
    FILES_HEADER,
    MOST_BYTES,
    RECEIVE_TIMEOUT_S,
    WEIGHTS,
    AdapterFile,
    AdapterFiles,
)
from skylite.errors import ConfigError, EngineFailed
from skylite.run.run_dir import AdapterVersion
from skylite.untrusted_files import open_file, read_bytes
from skylite.untrusted_text import plain

CHUNK_BYTES = 1 << 20


class ReceiverClient:
    """A receiver, one attempt per call. Every failure is one of its engine: EngineFailed."""

    def __init__(self, engine_name: str, address: Address) -> None:
        self.name = f"the receiver {address.url} of {engine_name}"
        self._connections = Connections(self.name, address, 1)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._connections.aclose()

    async def check(self) -> None:
        """Raise EngineFailed unless it is a receiver of this version that takes the key."""
        found = (await self._ask("GET", "/")).get("skylite")
        if found != __version__:
            raise EngineFailed(f"{self.name} is of skylite {plain(str(found))}, and this is {__version__}.")

    async def push(self, adapter: AdapterVersion) -> AdapterVersion:
        """Send a published adapter. Returns it at the path where the engine loads it.

        Raises ModelError if it was changed since.
        """
        files = await asyncio.to_thread(_files, adapter)
        headers = {
            FILES_HEADER: AdapterFiles.dump_json(files).decode(),
            "content-length": str(sum(file.size for file in files)),
        }
        body = _body(adapter.path, files)
        answer = await self._ask(
            "PUT", f"/adapters/{adapter.name}", RECEIVE_TIMEOUT_S, content=body, headers=headers
        )
        path = Path(str(answer.get("path")))
        if not path.is_absolute():
            raise EngineFailed(f"{self.name} does not tell where it put {adapter.name}.")
        return replace(adapter, path=path)

    async def delete(self, name: str) -> None:
        """Delete an adapter. No error if it is not there."""
        await self._ask("DELETE", f"/adapters/{name}")

    async def _ask(
        self, method: str, path: str, timeout_s: float = STATUS_TIMEOUT_S, **more: Any
    ) -> dict[str, Any]:
        reply = await self._connections.send(method, path, timeout_s=timeout_s, **more)
        try:
            answer = reply.json()
        except ValueError:
            answer = None
        if not isinstance(answer, dict) or not (reply.is_success or "detail" in answer):
            raise EngineFailed(
                f"{self.name} does not answer as `skylite receive` (HTTP {reply.status_code})."
            )
        if reply.is_success:
            return answer
        raise EngineFailed(
            f"{self.name} refused {method} {path}: {plain(str(answer['detail'])[:400]).rstrip('.')} "
            f"(HTTP {reply.status_code})."
        )


def _files(adapter: AdapterVersion) -> list[AdapterFile]:
    manifest = read_manifest(adapter.path)
    files = [AdapterFile(name=WEIGHTS, size=manifest.weights_bytes, sha256=manifest.weights_sha256)]
    for name in sorted(MOST_BYTES.keys() - {WEIGHTS}):
        data = read_bytes(adapter.path / name)
        files.append(AdapterFile(name=name, size=len(data), sha256=hashlib.sha256(data).hexdigest()))
    return files


async def _body(folder: Path, files: Sequence[AdapterFile]) -> AsyncIterator[bytes]:
    for file in files:
        with open_file(folder / file.name) as stream:
            while chunk := await asyncio.to_thread(stream.read, CHUNK_BYTES):
                yield chunk


@asynccontextmanager
async def pushed(engine_name: str, address: Address, probe: AdapterVersion) -> AsyncIterator[AdapterVersion]:
    """The probe where its engine loads it, until the block ends. Raises ConfigError."""
    async with aclosing(ReceiverClient(engine_name, address)) as receiver:
        try:
            await receiver.check()
            there = await receiver.push(probe)
        except EngineFailed as error:
            raise ConfigError(
                error.what,
                "Start `skylite receive` of this version on the engine's machine, and name it in "
                "engine.push_urls, and the variable with its key in engine.push_key_env.",
            ) from None
        try:
            yield there
        finally:
            with suppress(EngineFailed):
                await receiver.delete(probe.name)


class PushingEngine:
    """An interface.Engine whose adapters go to the receiver beside it before it loads them."""

    def __init__(self, engine: Engine, address: Address) -> None:
        self.name = engine.name
        self._engine = engine
        self._receiver = ReceiverClient(engine.name, address)
        self.is_ready, self.progress = engine.is_ready, engine.progress
        self.sleep, self.wake = engine.sleep, engine.wake
        self.generate, self.score, self.top_tokens = engine.generate, engine.score, engine.top_tokens

    async def load_adapter(self, adapter: AdapterVersion) -> None:
        """Push it, then load it from there."""
        await self._engine.load_adapter(await self._receiver.push(adapter))

    async def unload_adapter(self, name: str) -> None:
        """Unload it, then delete it there."""
        await self._engine.unload_adapter(name)
        await self._receiver.delete(name)

    async def aclose(self) -> None:
        """Close the connections."""
        await self._engine.aclose()
        await self._receiver.aclose()
