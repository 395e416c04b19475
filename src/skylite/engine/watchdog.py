"""Keeps one engine alive: restarts a server that dies or hangs, with its adapters, and verifies them.

Requests wait meanwhile and then continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from skylite.config.engine import EngineConfig
from skylite.engine.interface import Engine, EngineSpec, Launcher
from skylite.engine.retrying_engine import RetryingEngine
from skylite.errors import ChildDied, EngineDead, EngineFailed, RunFailed
from skylite.processes.child import (
    POLL_S,
    Child,
    ProcessSpec,
    Supervisor,
    child_died,
    log_tail,
    poll,
    raw_log_tail,
)
from skylite.processes.starvation import Starvation
from skylite.progress_reporting import LongWork, duration, long_work
from skylite.run.run_dir import AdapterVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOG_LINES = 15
PROGRESS_POLL_S = 1.0
"""Longest interval between two checks of an engine's progress."""
READY_POLL_S = 0.2

Verify = Callable[[Engine, AdapterVersion], Awaitable[object]]
"""Raises SyncFailed unless the engine samples from the adapter that it has just reloaded."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RestartPolicy:
    """How a watchdog handles a failed engine."""

    config: EngineConfig
    verify: Verify
    counts: dict[str, int]
    """Engine name -> restarts so far. A run that restarts its trainer, and so its engines, keeps counting."""


@dataclass(slots=True)
class Watchdog:
    """One engine: its process, and how it restarts. Other engines are not affected."""

    launcher: Launcher
    spec: EngineSpec
    supervisor: Supervisor
    restarts: RestartPolicy
    child: Child

    @classmethod
    def start(
        cls,
        launcher: Launcher,
        spec: EngineSpec,
        logs: Path,
        supervisor: Supervisor,
        restarts: RestartPolicy,
    ) -> Watchdog:
        """Start the server.

        Until `keep_alive`, the supervisor watches it like any child and ends the run if it fails, because it
        would fail again.
        """
        process = engine_process(launcher, spec, logs / f"{spec.name}.log")
        return cls(launcher, spec, supervisor, restarts, supervisor.start(process))

    async def wait_ready(self) -> RetryingEngine:
        """Wait until the engine serves. Raises RunFailed."""
        engine = self.launcher.connect(self.spec)
        with engine_starting(self.launcher, self.spec, self.child):
            await wait_ready(engine, self.restarts.config.start_timeout_s, self.child.spec.log_path)
        return RetryingEngine(engine)

    async def keep_alive(self, engine: RetryingEngine) -> NoReturn:
        """Restart the server whenever it fails. Raises the last RunFailed after `max_restarts` restarts."""
        self.supervisor.leave_to_caller(self.spec.name)
        allowed, counts = self.restarts.config.max_restarts, self.restarts.counts
        error = await self._wait_for_failure(engine)
        while (count := counts.get(self.spec.name, 0) + 1) <= allowed:
            engine.pause()
            counts[self.spec.name] = count
            logger.warning(f"{error.what} It restarts ({count} of engine.max_restarts={allowed}).")
            await engine.until_needed()
            try:
                await self._restart(engine)
            except RunFailed as restart_error:
                error = restart_error
            else:
                error = await self._wait_for_failure(engine)
        raise error

    async def _wait_for_failure(self, engine: RetryingEngine) -> RunFailed:
        """Return the reason once the process ends or hangs."""
        try:
            timeout_s, starvation = self.restarts.config.stall_timeout_s, Starvation(self.child.pid)
            hang = await while_alive(self.child, wait_for_hang(engine, timeout_s, starvation.seconds))
        except ChildDied as error:
            return error
        log = self.child.spec.log_path
        return ChildDied(hang.what, f"Its log is {log}.", log_tail(log, LOG_LINES, self.child.log_start))

    async def _restart(self, engine: RetryingEngine) -> None:
        """Start a new server and load the engine's adapters. Raises RunFailed."""
        self.supervisor.stop_child(self.spec.name, timeout_s=0)
        if socket := self.spec.address.socket:
            socket.unlink(missing_ok=True)  # no server can bind to an existing one
        process = engine_process(self.launcher, self.spec, self.child.spec.log_path)
        self.child = self.supervisor.start(process)
        self.supervisor.leave_to_caller(self.spec.name)
        client = self.launcher.connect(self.spec)
        try:
            async with asyncio.timeout(self.restarts.config.start_timeout_s):
                await while_alive(self.child, self._reload_adapters(client, list(engine.adapters.values())))
        except TimeoutError:
            await client.aclose()
            timeout_s = self.restarts.config.start_timeout_s
            raise RunFailed(
                f"{self.spec.name} did not restart within {timeout_s:g} s (engine.start_timeout_s)."
            ) from None
        except RunFailed:
            await client.aclose()
            raise
        await engine.resume(client)

    async def _reload_adapters(self, client: Engine, adapters: list[AdapterVersion]) -> None:
        """Wait until the server serves, then load and verify the adapters."""
        await wait_ready(client, self.restarts.config.start_timeout_s, self.child.spec.log_path)
        for adapter in adapters:
            await client.load_adapter(adapter)
            await self.restarts.verify(client, adapter)


def engine_process(launcher: Launcher, spec: EngineSpec, log_path: Path) -> ProcessSpec:
    """The server's process. A public one, behind a token, shares the machine's network."""
    return ProcessSpec(
        name=spec.name,
        argv=launcher.command(spec),
        env=launcher.environment(spec),
        log_path=log_path,
        own_network=not spec.shared_network and spec.address.socket is not None,
    )


@contextmanager
def engine_starting(
    launcher: Launcher, spec: EngineSpec, child: Child, *, is_logged: bool = True
) -> Iterator[LongWork]:
    """Show what the server does until the block ends, which is when it serves. `is_logged`: log that then."""

    def state() -> str:
        return launcher.startup_state(raw_log_tail(child.spec.log_path, child.log_start))

    with long_work(f"{spec.name} starts", detail=state) as work:
        yield work
    if is_logged:
        logger.info(f"{spec.name} is ready after {duration(work.elapsed_s)}")


def bring_up(
    launcher: Launcher,
    spec: EngineSpec,
    child: Child,
    timeout_s: float,
    adapter: AdapterVersion | None = None,
) -> None:
    """Wait until a server that no watchdog restarts serves, and load the adapter. Raises RunFailed."""

    async def connect() -> None:
        engine = launcher.connect(spec)
        try:
            await wait_ready(engine, timeout_s, child.spec.log_path)
            if adapter is not None:
                await engine.load_adapter(adapter)
        finally:
            await engine.aclose()

    asyncio.run(while_alive(child, connect()))


async def while_alive(child: Child, work: Coroutine[Any, Any, T]) -> T:
    """The result of `work`. Raises ChildDied if the process ends first."""
    task = asyncio.ensure_future(work)
    try:
        while not task.done():
            if poll(child) is not None:
                raise child_died(child)
            await asyncio.wait({task}, timeout=POLL_S)
        return task.result()
    finally:
        task.cancel()


async def wait_ready(engine: Engine, timeout_s: float, log: Path) -> None:
    """Wait until the engine serves. Raises RunFailed after `timeout_s`."""
    deadline = asyncio.get_running_loop().time() + timeout_s
    while not await engine.is_ready():
        if asyncio.get_running_loop().time() > deadline:
            raise RunFailed(
                f"{engine.name} did not serve within {timeout_s:.0f} s.",
                f"Read {log}, or raise engine.start_timeout_s.",
            )
        await asyncio.sleep(READY_POLL_S)


async def wait_for_hang(
    engine: RetryingEngine, stall_timeout_s: float, starved_s: Callable[[], float] = lambda: 0.0
) -> EngineFailed:
    """Return the reason once the engine fails.

    It fails if it reports so, or if it does not answer or makes no progress for `stall_timeout_s` while
    requests are in flight. Whether it serves is not enough: a server may answer while its engine hangs. The
    progress covers all requests, so a request that waits in the queue is not a hang. Streaming would detect
    hangs too, but costs time for every token. `starved_s`: seconds since its last call in which the engine
    waited for a core, on a machine that others use; they do not count.
    """
    clock = asyncio.get_running_loop().time
    progress, since, stalls = -1.0, clock(), False
    failure: EngineFailed | None = None
    while clock() - since <= stall_timeout_s:
        engine.note_work(since)
        polled = clock()
        await asyncio.sleep(min(PROGRESS_POLL_S, stall_timeout_s / 4))
        if engine.unusable is not None:
            return engine.unusable
        if stalls:  # asked only then: it costs some ms
            since += min(starved_s(), clock() - polled)
        stalls = engine.in_flight > 0
        try:
            now, failure = await engine.progress(), None
        except EngineDead as error:
            return error
        except EngineFailed as error:
            failure = error
            continue
        if now < progress:
            return EngineFailed(f"{engine.name} was restarted: it counts fewer tokens than before.")
        if now != progress or engine.in_flight == 0:
            progress, since, stalls = now, clock(), False
    return failure or EngineFailed(
        f"{engine.name} generated no token for {stall_timeout_s:g} s while {engine.in_flight} requests "
        "waited, and it reports no problem."
    )
