"""Keeps one engine alive: restarts a server that dies or hangs, with its adapters, and verifies them.

Requests wait meanwhile and then continue.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from skylite.config.engine import EngineConfig
from skylite.engine.retrying_client import Engine
from skylite.engine.vllm.client import VllmClient
from skylite.engine.vllm.hang_detection import wait_for_hang
from skylite.engine.vllm.server_command import EngineSpec, engine_command, engine_env
from skylite.engine.vllm.startup_progress import engine_starting
from skylite.errors import ChildDied, RunFailed
from skylite.processes.child import POLL_S, Child, ProcessSpec, Supervisor, child_died, log_tail, poll
from skylite.run.run_dir import AdapterVersion

logger = logging.getLogger(__name__)
T = TypeVar("T")

LOG_LINES = 15

Verify = Callable[[VllmClient, AdapterVersion], Awaitable[object]]
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

    spec: EngineSpec
    logs: Path
    supervisor: Supervisor
    restarts: RestartPolicy
    child: Child

    @classmethod
    def start(cls, spec: EngineSpec, logs: Path, supervisor: Supervisor, restarts: RestartPolicy) -> Watchdog:
        """Start the server.

        Until `keep_alive`, the supervisor watches it like any child and ends the run if it fails, because it
        would fail again.
        """
        return cls(spec, logs, supervisor, restarts, supervisor.start(_process(spec, logs)))

    async def wait_ready(self) -> Engine:
        """Wait until the engine serves. Raises RunFailed."""
        client = VllmClient(self.spec.name, self.spec.uds, max_connections=self.spec.max_num_seqs)
        with engine_starting(self.spec, self.child):
            await client.wait_ready(self.restarts.config.start_timeout_s)
        return Engine(client)

    async def keep_alive(self, engine: Engine) -> NoReturn:
        """Restart the server whenever it fails. Raises the last RunFailed after `max_restarts` restarts."""
        self.supervisor.leave_to_caller(self.spec.name)
        allowed, counts = self.restarts.config.max_restarts, self.restarts.counts
        error = await self._wait_for_failure(engine)
        while (count := counts.get(self.spec.name, 0) + 1) <= allowed:
            engine.pause()
            counts[self.spec.name] = count
            logger.warning(f"{error.what} It restarts ({count} of engine.max_restarts={allowed}).")
            try:
                await self._restart(engine)
            except RunFailed as restart_error:
                error = restart_error
            else:
                error = await self._wait_for_failure(engine)
        raise error

    async def _wait_for_failure(self, engine: Engine) -> RunFailed:
        """Return the reason once the process ends or hangs."""
        try:
            hang = await self._while_alive(wait_for_hang(engine, self.restarts.config.stall_timeout_s))
        except ChildDied as error:
            return error
        log = self.child.spec.log_path
        return ChildDied(hang.what, f"Its log is {log}.", log_tail(log, LOG_LINES, self.child.log_start))

    async def _restart(self, engine: Engine) -> None:
        """Start a new server and load the engine's adapters. Raises RunFailed."""
        self.supervisor.stop_child(self.spec.name, timeout_s=0)
        self.spec.uds.unlink(missing_ok=True)  # vLLM cannot bind to an existing socket
        self.child = self.supervisor.start(_process(self.spec, self.logs))
        self.supervisor.leave_to_caller(self.spec.name)
        client = VllmClient(self.spec.name, self.spec.uds, max_connections=self.spec.max_num_seqs)
        try:
            async with asyncio.timeout(self.restarts.config.start_timeout_s):
                await self._while_alive(self._reload_adapters(client, list(engine.adapters.values())))
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

    async def _reload_adapters(self, client: VllmClient, adapters: list[AdapterVersion]) -> None:
        """Wait until the server serves, then load and verify the adapters."""
        await client.wait_ready(self.restarts.config.start_timeout_s)
        for adapter in adapters:
            await client.load_adapter(adapter)
            await self.restarts.verify(client, adapter)

    async def _while_alive(self, work: Coroutine[Any, Any, T]) -> T:
        """The result of `work`. Raises ChildDied if the process ends first."""
        task = asyncio.ensure_future(work)
        try:
            while not task.done():
                if poll(self.child) is not None:
                    raise child_died(self.child)
                await asyncio.wait({task}, timeout=POLL_S)
            return task.result()
        finally:
            task.cancel()


def _process(spec: EngineSpec, logs: Path) -> ProcessSpec:
    return ProcessSpec(
        name=spec.name,
        argv=engine_command(spec),
        env=engine_env(spec, {}),
        log_path=logs / f"{spec.name}.log",
        own_network=not spec.shared_network,
    )
