"""All engines of a run: each adapter version is loaded on every engine or on none, then verified."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from skylite.adapters.manifest import read_manifest
from skylite.engine.canary import EarlierAnswers, verify
from skylite.engine.canary_reading import CanaryReading
from skylite.engine.retrying_engine import RetryingEngine
from skylite.errors import ModelError, SyncFailed
from skylite.run.run_dir import AdapterVersion

LOAD_ATTEMPTS = 2
NOT_READ = CanaryReading(gap_max=math.nan, gap_mean=math.nan, base_distance=math.nan, projection=math.nan)
"""Of a run without an engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SyncReport:
    """One adapter sync over all engines: seconds, and the worst canary reading."""

    load_s: float
    canary_s: float
    canary: CanaryReading


@dataclass(frozen=True, slots=True)
class LeftOut:
    """Which engines do not serve now, by name. Only those of engine.urls ever do not."""

    reasons: dict[str, str] = field(default_factory=dict)
    since_canary: set[str] = field(default_factory=set)
    """Those that were left out at some time since the last canary, too: another server may answer there."""


@dataclass(slots=True)
class EnginePool:
    """The engines and the adapter versions that all of them serve."""

    engines: Sequence[RetryingEngine]
    tolerance: float | None
    """Of the canary; None: the rule of canary_limits_bf16.py."""
    loaded: list[AdapterVersion] = field(default_factory=list)
    """Oldest first. The last but one stays loaded while requests use it."""
    left_out: LeftOut = field(default_factory=LeftOut)
    """Others do the work of these, and they load what is loaded when they are back."""
    _answers: defaultdict[str, EarlierAnswers] = field(default_factory=lambda: defaultdict(EarlierAnswers))
    """To canaries, by engine."""

    async def load(self, adapter: AdapterVersion) -> float:
        """Load `adapter` on every engine, next to the versions they serve. Returns seconds.

        Raises SyncFailed if an engine refuses it twice.
        """
        started = time.monotonic()
        await self._load_everywhere(adapter)
        self.loaded.append(adapter)
        return time.monotonic() - started

    async def verify(self, adapter: AdapterVersion) -> CanaryReading:
        """Verify the hash of the weights, and that every engine samples from them. Returns the worst reading.

        On failure unloads the version everywhere and raises ModelError or SyncFailed.
        """
        try:
            canary = (await asyncio.to_thread(read_manifest, adapter.path)).canary
            while self.left_out.since_canary:
                self._answers.pop(self.left_out.since_canary.pop(), None)
            serving = [e for e in self.engines if e.name not in self.left_out.reasons]
            if not serving:
                return NOT_READ
            readings = await asyncio.gather(
                *(verify(e, adapter, canary, self.tolerance, self._answers[e.name]) for e in serving)
            )
        except (SyncFailed, ModelError):
            self.loaded.remove(adapter)
            await self._unload_everywhere(adapter)
            raise
        worst = max(readings, key=lambda r: r.gap_max)
        return replace(worst, is_verified=all(r.is_verified for r in readings))

    async def unload_before(self, before: int) -> list[AdapterVersion]:
        """Unload all versions older than `before`, which no request may use. Returns them."""
        old = [a for a in self.loaded if a.version < before]
        self.loaded = [a for a in self.loaded if a.version >= before]
        for adapter in old:
            await self._unload_everywhere(adapter)
        return old

    async def sleep(self) -> None:
        """Let every engine give memory back until `wake`."""
        await asyncio.gather(*(e.sleep() for e in self.engines))

    async def wake(self) -> None:
        """Wake every engine."""
        await asyncio.gather(*(e.wake() for e in self.engines))

    async def unload(self, adapter: AdapterVersion) -> None:
        """Unload one version, which no request may use."""
        self.loaded.remove(adapter)
        await self._unload_everywhere(adapter)

    async def _load_everywhere(self, adapter: AdapterVersion) -> None:
        """All or nothing: if one engine fails, the others unload the version before the next attempt."""
        for attempt in range(1, LOAD_ATTEMPTS + 1):
            results = await asyncio.gather(
                *(e.load_adapter(adapter) for e in self.engines), return_exceptions=True
            )
            failures = [r for r in results if isinstance(r, BaseException)]
            if not failures:
                return
            for engine, result in zip(self.engines, results, strict=True):
                if not isinstance(result, BaseException):
                    await engine.unload_adapter(adapter.name)
            if attempt == LOAD_ATTEMPTS:
                raise failures[0]

    async def _unload_everywhere(self, adapter: AdapterVersion) -> None:
        await asyncio.gather(*(e.unload_adapter(adapter.name) for e in self.engines))
