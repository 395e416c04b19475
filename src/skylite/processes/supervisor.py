"""Starts the child processes of a run, detects the first that exits, and stops them all."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from typing import NoReturn, Self

from skylite.processes.child import (
    Child,
    ProcessSpec,
    child_died,
    kill,
    poll,
    raw_log_tail,
    start,
    stopped_processes,
    terminate,
)

POLL_S = 0.05
STOP_TIMEOUT_S = 5.0


class Supervisor:
    """`async with Supervisor() as supervisor:` leaves no process behind, however the block ends."""

    def __init__(
        self, stop_timeout_s: float = STOP_TIMEOUT_S, skip_wait: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Args:
            stop_timeout_s: time for children to exit after SIGTERM at the end of the block, before SIGKILL.
            skip_wait: polled during that time; True kills the children at once.
        """
        self._stop_timeout_s = stop_timeout_s
        self._skip_wait = skip_wait
        self._children: dict[str, Child] = {}
        self._may_exit: set[str] = set()
        self._left_to_caller: set[str] = set()
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for child in self._children.values():
                terminate(child)
            deadline = time.monotonic() + self._stop_timeout_s
            while (
                time.monotonic() < deadline
                and not self._skip_wait()
                and any(poll(c) is None for c in self._children.values())
            ):
                await asyncio.sleep(POLL_S)  # lets the event loop handle a second Ctrl-C
        finally:
            self.stop(timeout_s=0)

    def start(self, spec: ProcessSpec) -> Child:
        """Start a child. stop_child() frees its name for reuse. Raises RunFailed."""
        if spec.name in self._children:
            raise ValueError(f"a child named {spec.name} already exists")
        child = start(spec)
        self._children[spec.name] = child
        return child

    def leave_to_caller(self, name: str) -> None:
        """From now on the caller handles the exit of this child; `check` ignores it."""
        self._left_to_caller.add(name)

    def fail(self, error: BaseException) -> None:
        """Make `check` and `watch` raise `error`: the caller that handles a child gives up."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raise the error given to `fail`, or ChildDied for an exited child.

        Exit code 0 is an error too, unless the child's spec says it is done or `wait_exit` waits for it.
        """
        if self._failure is not None:
            raise self._failure
        watched = [c for c in self._children.values() if c.name not in self._left_to_caller]
        ended = [c for c in watched if poll(c) is not None and not self._has_finished(c)]
        # One failure can take other children down: report a failed child before one that exited with 0.
        for child in sorted(ended, key=lambda c: poll(c) == 0):
            raise child_died(child)

    def pids(self) -> dict[str, int]:
        """Name -> process group id of the running children."""
        return {name: child.pid for name, child in self._children.items() if poll(child) is None}

    def stopped_pids(self, name: str) -> list[int]:
        """Ids of a child's processes that are stopped by a signal."""
        return stopped_processes(self._children[name]) if name in self._children else []

    def recent_log(self, name: str) -> str:
        """The last part of a child's log since its start; "" for an unknown child."""
        child = self._children.get(name)
        return "" if child is None else raw_log_tail(child.spec.log_path, child.log_start)

    async def watch(self) -> NoReturn:
        """Call `check` every POLL_S seconds until it raises."""
        while True:
            self.check()
            await asyncio.sleep(POLL_S)

    async def wait_exit(self, name: str) -> None:
        """Wait until this child exits. Raises ChildDied unless its exit code is 0."""
        child = self._children[name]
        self._may_exit.add(name)
        while poll(child) is None:
            await asyncio.sleep(POLL_S)
        if poll(child) != 0:
            raise child_died(child)

    def stop_child(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop one child and its process tree: SIGTERM, then SIGKILL after `timeout_s` seconds."""
        _stop_children([self._children[name]], timeout_s)
        self._forget(name)

    def stop(self, timeout_s: float) -> None:
        """Stop all children and their process trees: SIGTERM, then SIGKILL after `timeout_s` seconds."""
        _stop_children(list(self._children.values()), timeout_s)
        for name in list(self._children):
            self._forget(name)

    def _has_finished(self, child: Child) -> bool:
        return poll(child) == 0 and (child.name in self._may_exit or child.spec.is_done())

    def _forget(self, name: str) -> None:
        del self._children[name]
        self._may_exit.discard(name)
        self._left_to_caller.discard(name)


def _stop_children(children: list[Child], timeout_s: float) -> None:
    try:
        for child in children:
            terminate(child)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(poll(c) is None for c in children):
            time.sleep(0.02)
    finally:
        for child in children:
            kill(child)
