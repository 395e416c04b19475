"""The parent's side of episode_host.py: starts it, sends it episodes, and waits for their results."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import json
import os
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from skylite.environments.chat import Endpoint, Task
from skylite.environments.episode_spec import USERS_FOLDER
from skylite.errors import ConfigError, RunFailed
from skylite.processes.child import ProcessSpec, Supervisor
from skylite.untrusted_text import parse_json, plain

NAME = "episodes"
START_S = 120.0
END_S = 10.0
"""Time for the host to report the end of an episode that it has killed."""
LOOK_S = 0.2
"""Shortest interval between two looks at an episode's clock."""
MAX_LINE = 1 << 20


class EpisodeFailed(Exception):
    """An episode raised, or its process ended. The text says which."""

    def __init__(self, text: str, *, at_limit: bool = False) -> None:
        super().__init__(text)
        self.at_limit = at_limit
        """Whether a limit of the trajectory may be the only reason."""


class EpisodeTooLong(Exception):
    """An episode reached env.timeout_s."""


@dataclass(frozen=True, slots=True)
class EpisodeEnd:
    """How an episode ended, beside its value."""

    task_id: str
    seconds: float
    """From the start of its process to its result."""


@dataclass(slots=True)
class EpisodePool:
    """Sends episodes to the host. `run` may be called many times at once."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    logs: Path
    on_end: Callable[[EpisodeEnd], None] | None = None
    """Called at the end of each episode, before `run` returns."""
    _numbers: itertools.count[int] = field(default_factory=itertools.count)
    _waiting: dict[int, asyncio.Future[dict[str, Any]]] = field(default_factory=dict)

    @property
    def log_path(self) -> Path:
        """What the host and the episodes print."""
        return _log_path(self.logs)

    async def run(self, task: Task, endpoint: Endpoint, timeout_s: float, lost_s: Callable[[], float]) -> Any:
        """The value that the episode returned. Raises EpisodeFailed or EpisodeTooLong.

        `lost_s`: seconds so far that do not count towards `timeout_s`, because the engine did not work.
        """
        number = next(self._numbers)
        future: asyncio.Future[dict[str, Any]] = asyncio.get_running_loop().create_future()
        self._waiting[number] = future
        if self.on_end is not None:
            future.add_done_callback(partial(_report_episode, self.on_end, task.id))
        try:
            await self._send(
                {"id": number, "task": dataclasses.asdict(task), "endpoint": dataclasses.asdict(endpoint)}
            )
            try:
                found = await _result(future, timeout_s, lost_s)
            except TimeoutError:
                await self._send({"cancel": number})
                await asyncio.wait({future}, timeout=END_S)
                raise EpisodeTooLong from None
        except asyncio.CancelledError:
            with contextlib.suppress(OSError):
                await self._send({"cancel": number})
            raise
        finally:
            self._waiting.pop(number, None)
        if "value" in found:
            return found["value"]
        if "raised" in found:
            raise EpisodeFailed(
                f"raised {plain(str(found['raised']))}", at_limit=found.get("at_limit") is True
            )
        raise EpisodeFailed(f"ended its process with {found.get('ended')} before it returned a reward")

    async def read_results(self) -> None:
        """Pass results to the episodes that wait, until the host ends; then they all fail."""
        while line := await self.reader.readline():
            message = parse_json(line)
            future = self._waiting.get(message["id"])
            if future is not None and not future.done():
                future.set_result(message)
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(_host_lost(self.logs))

    async def _send(self, message: dict[str, Any]) -> None:
        self.writer.write(json.dumps(message).encode() + b"\n")
        await self.writer.drain()


async def _result(
    future: asyncio.Future[dict[str, Any]], timeout_s: float, lost_s: Callable[[], float]
) -> dict[str, Any]:
    """What the host reports. Raises TimeoutError."""
    clock = asyncio.get_running_loop().time
    started, lost_before = clock(), lost_s()
    while not future.done():
        left = timeout_s - (clock() - started) + max(0.0, lost_s() - lost_before)
        if left <= 0:
            raise TimeoutError
        await asyncio.wait({future}, timeout=max(left, LOOK_S))
    return future.result()


@contextlib.asynccontextmanager
async def running_episodes(
    spec: str, sha256: str | None, folder: Path, logs: Path, supervisor: Supervisor
) -> AsyncIterator[EpisodePool]:
    """Start the host with the episode function of `spec`, and end it with the block.

    `folder`: for the socket; mode 0700. Raises ConfigError if the function cannot be loaded.
    """
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]]
    connected = asyncio.get_running_loop().create_future()

    def on_connect(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if not connected.done():
            connected.set_result((reader, writer))

    path = folder / "episodes.sock"
    server = await asyncio.start_unix_server(on_connect, path, limit=MAX_LINE)
    command = [
        sys.executable,
        "-P",
        "-u",
        "-m",
        "skylite.environments.episode_host",
        str(path),
        spec,
        sha256 or "",
    ]
    try:
        env = {"PYTHONHASHSEED": "0", USERS_FOLDER: os.getcwd()}
        supervisor.start(ProcessSpec(name=NAME, argv=command, env=env, log_path=_log_path(logs)))
        # Its end is no ChildDied until it has said why it cannot start.
        supervisor.leave_to_caller(NAME)
        reader, writer = await _within(connected, logs)
        _check_started(parse_json(await reader.readline() or b"{}"), logs)
        pool = EpisodePool(reader, writer, logs)
        reading = asyncio.ensure_future(pool.read_results())
        reading.add_done_callback(partial(_report_end, supervisor, logs))
        try:
            yield pool
        finally:
            reading.cancel()
            writer.close()
    finally:
        server.close()
        path.unlink(missing_ok=True)
        if NAME in supervisor.pids():
            supervisor.stop_child(NAME, timeout_s=1.0)


def _report_episode(
    on_end: Callable[[EpisodeEnd], None], task_id: str, ended: asyncio.Future[dict[str, Any]]
) -> None:
    if not ended.cancelled() and ended.exception() is None:
        on_end(EpisodeEnd(task_id, ended.result()["seconds"]))


def _check_started(first: dict[str, Any], logs: Path) -> None:
    if "failed" in first:
        raise ConfigError(str(first["failed"]), str(first["hint"]) or "Fix that file.")
    if "ready" not in first:
        raise _host_lost(logs)


def _report_end(supervisor: Supervisor, logs: Path, reading: asyncio.Future[None]) -> None:
    if not reading.cancelled():
        supervisor.fail(_host_lost(logs))


async def _within(
    connected: asyncio.Future[tuple[asyncio.StreamReader, asyncio.StreamWriter]], logs: Path
) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    try:
        return await asyncio.wait_for(connected, START_S)
    except TimeoutError:
        raise _host_lost(logs) from None


def _host_lost(logs: Path) -> RunFailed:
    return RunFailed(
        "The process that runs the episodes ended or does not answer.", f"Read {_log_path(logs)}."
    )


def _log_path(logs: Path) -> Path:
    return logs / f"{NAME}.log"
