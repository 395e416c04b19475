"""Owns a run's child processes: starts them, notices the first that ends, and ends them all."""

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
    """`async with Supervisor() as supervisor:` leaves no process behind, whatever ends the block."""

    def __init__(
        self, stop_timeout_s: float = STOP_TIMEOUT_S, skip_wait: Callable[[], bool] = lambda: False
    ) -> None:
        """`skip_wait`: asked again and again while children are given time to end."""
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
                await asyncio.sleep(POLL_S)  # so that a second Ctrl-C is heard
        finally:
            self.stop(timeout_s=0)

    def start(self, spec: ProcessSpec) -> Child:
        """Start a child. A name is free again after stop_child(). Raises RunFailed."""
        if spec.name in self._children:
            raise ValueError(f"a child named {spec.name} is there already")
        child = start(spec)
        self._children[spec.name] = child
        return child

    def leave_to_caller(self, name: str) -> None:
        """From now on the end of this child is the caller's affair."""
        self._left_to_caller.add(name)

    def fail(self, error: BaseException) -> None:
        """Let `check` and `watch` raise this: a caller to whom a child was left gives up."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raise ChildDied for a child that has ended, exit code 0 included, unless its spec says that it is done; or what `fail` got."""
        if self._failure is not None:
            raise self._failure
        watched = [c for c in self._children.values() if c.name not in self._left_to_caller]
        ended = [c for c in watched if poll(c) is not None and not self._has_finished(c)]
        # Several can end at once, one pulling down the next; the one that failed says more than the one that then left in order.
        for child in sorted(ended, key=lambda c: poll(c) == 0):
            raise child_died(child)

    def pids(self) -> dict[str, int]:
        """Name to process group of the children that run."""
        return {name: child.pid for name, child in self._children.items() if poll(child) is None}

    def stopped_pids(self, name: str) -> list[int]:
        """Processes of a child that a signal has stopped."""
        return stopped_processes(self._children[name]) if name in self._children else []

    def recent_log(self, name: str) -> str:
        """The end of what a child has written since it was started; "" for a child that is not there."""
        child = self._children.get(name)
        return "" if child is None else raw_log_tail(child.spec.log_path, child.log_start)

    async def watch(self) -> NoReturn:
        """Raise ChildDied soon (POLL_S) after a child has ended."""
        while True:
            self.check()
            await asyncio.sleep(POLL_S)

    async def wait_exit(self, name: str) -> None:
        """Wait until this child ends by itself. Raises ChildDied unless with exit code 0."""
        child = self._children[name]
        self._may_exit.add(name)
        while poll(child) is None:
            await asyncio.sleep(POLL_S)
        if poll(child) != 0:
            raise child_died(child)

    def stop_child(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """End one child with its whole tree."""
        _stop_children([self._children[name]], timeout_s)
        self._forget(name)

    def stop(self, timeout_s: float) -> None:
        """SIGTERM for all; SIGKILL, for the whole trees, after `timeout_s` seconds."""
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
