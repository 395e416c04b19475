"""All engines of a run as one: a version is loaded by every engine or by none, and what is sampled from it is used once it is verified."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from skylite.adapters.manifest import read_manifest
from skylite.engine.canary import CanaryReading, verify
from skylite.engine.engine import Engine
from skylite.errors import ModelError, SyncFailed
from skylite.run.run_dir import AdapterVersion

LOAD_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One sync, all engines: seconds and the worst canary."""

    load_s: float
    canary_s: float
    canary: CanaryReading


@dataclass(slots=True)
class EnginePool:
    """The engines and the versions they all serve."""

    clients: Sequence[Engine]
    tolerance: float
    loaded: list[AdapterVersion] = field(default_factory=list)
    """Oldest first. The one before the newest is there while requests name it."""

    async def load(self, adapter: AdapterVersion) -> float:
        """Load `adapter` on every engine, beside what they serve. Returns seconds. Raises SyncFailed when an engine refuses it twice."""
        started = time.monotonic()
        await self._load_everywhere(adapter)
        self.loaded.append(adapter)
        return time.monotonic() - started

    async def verify(self, adapter: AdapterVersion) -> CanaryReading:
        """Check the weights' hash, and that every engine samples from them: the worst canary.

        Raises ModelError or SyncFailed; every engine then serves what it did before this version was loaded.
        """
        try:
            canary = (await asyncio.to_thread(read_manifest, adapter.path)).canary
            readings = await asyncio.gather(
                *(verify(c, adapter, canary, self.tolerance) for c in self.clients)
            )
        except (SyncFailed, ModelError):
            self.loaded.remove(adapter)
            await self._unload_everywhere(adapter)
            raise
        return max(readings, key=lambda r: r.gap_max)

    async def unload_before(self, before: int) -> list[AdapterVersion]:
        """Unload the versions older than `before`, which no request may name any more. Returns them."""
        old = [a for a in self.loaded if a.version < before]
        self.loaded = [a for a in self.loaded if a.version >= before]
        for adapter in old:
            await self._unload_everywhere(adapter)
        return old

    def engine_for(self, index: int) -> Engine:
        """Engines take prompts in turn."""
        return self.clients[index % len(self.clients)]

    async def _load_everywhere(self, adapter: AdapterVersion) -> None:
        """All or nothing: when one engine fails, those that loaded it unload it before the next attempt."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            results = await asyncio.gather(
                *(c.load_adapter(adapter) for c in self.clients), return_exceptions=True
            )
            failures = [r for r in results if isinstance(r, BaseException)]
            if not failures:
                return
            for client, result in zip(self.clients, results, strict=True):
                if not isinstance(result, BaseException):
                    await client.unload_adapter(adapter.name)
            if attempt == LOAD_ATTEMPTS:
                raise failures[0]

    async def _unload_everywhere(self, adapter: AdapterVersion) -> None:
        await asyncio.gather(*(c.unload_adapter(adapter.name) for c in self.clients))
