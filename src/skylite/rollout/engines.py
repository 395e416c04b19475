"""All engines of a run as one: a version is used only when every engine has it and has proven it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from dataclasses import dataclass

from skylite.errors import SyncFailed
from skylite.rollout.canary import CanaryReading, judge, read_canary
from skylite.rollout.client import VllmClient
from skylite.run.manifest import read_manifest
from skylite.run.run_dir import AdapterVersion

LOAD_ATTEMPTS = 2


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One sync, all engines: seconds and the worst canary."""

    load_s: float
    canary_s: float
    canary: CanaryReading


@dataclass(slots=True)
class Engines:
    """The engines and the version they all serve."""

    clients: Sequence[VllmClient]
    tolerance: float
    current: AdapterVersion | None = None

    async def use(self, adapter: AdapterVersion) -> SyncReport:
        """Load `adapter` on every engine, prove it with the canary, then unload the version before.

        Raises SyncFailed when an engine refuses it twice or its canary disagrees; every engine then still serves `current`.
        """
        manifest = read_manifest(adapter.path)
        started = time.monotonic()
        await self._load_everywhere(adapter)
        loaded = time.monotonic()
        try:
            readings = [
                await read_canary(c, adapter, manifest.canary.sequences, manifest.canary.policy_logprobs, manifest.canary.base_logprobs)
                for c in self.clients
            ]
            for client, reading in zip(self.clients, readings, strict=True):
                judge(adapter.name, client.name, reading, self.tolerance)
        except SyncFailed:
            await self._unload_everywhere(adapter)
            raise
        proven = time.monotonic()
        if self.current is not None:
            await self._unload_everywhere(self.current)
        self.current = adapter
        return SyncReport(load_s=loaded - started, canary_s=proven - loaded, canary=max(readings, key=lambda r: r.gap_max))

    def client_for(self, index: int) -> VllmClient:
        """Engines take prompts in turn."""
        return self.clients[index % len(self.clients)]

    async def _load_everywhere(self, adapter: AdapterVersion) -> None:
        """All or nothing: when one engine fails, those that loaded it unload it before the next attempt."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            results = await asyncio.gather(*(c.load_adapter(adapter) for c in self.clients), return_exceptions=True)
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
