"""Answers that clients come for: each request that takes time has an id, and one result."""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

from skylite.service.errors import Rejected

WAIT_S = 25.0
"""A client asks again after this time. Its own limit is 45 s."""
KEPT_S = 120.0
"""A result stays this long after it was fetched: the reply may have been lost on its way."""
Answer = dict[str, Any] | bytes
"""JSON, or protobuf."""


@dataclass(slots=True, eq=False)
class Future:
    """A request and, in time, its answer."""

    owner: str
    session: str
    done: asyncio.Event = field(default_factory=asyncio.Event)
    answer: Answer = b""
    fetched_at: float | None = None
    task: asyncio.Task[None] | None = None
    """What makes the answer."""
    is_sample: bool = False
    """Nothing else relies on it, so it can be cancelled alone."""

    def fail(self, reason: str, *, is_users: bool = True) -> None:
        """End it with an error, unless it has an answer."""
        if not self.done.is_set():
            self.finish({"error": reason, "category": "user" if is_users else "server"})

    def finish(self, answer: Answer) -> None:
        self.answer = answer
        self.done.set()


@dataclass(slots=True)
class Futures:
    """All of them, by id."""

    by_id: dict[str, Future] = field(default_factory=dict)

    def create(self, owner: str, session: str) -> str:
        name = secrets.token_hex(12)
        self.by_id[name] = Future(owner, session)
        return name

    def get(self, name: str, owner: str) -> Future:
        """Raises Rejected for an id that this user does not have."""
        future = self.by_id.get(name)
        if future is None or future.owner != owner:
            raise Rejected("No request of yours has this request_id, or its answer was dropped.", 404)
        return future

    def start(self, name: str, work: Callable[[], Awaitable[Answer]]) -> None:
        """Work on the answer beside everything else."""
        future = self.by_id[name]
        future.task = asyncio.create_task(answer(future, work))

    async def wait(self, name: str, owner: str) -> Answer | None:
        """The answer; None if it takes longer than WAIT_S."""
        future = self.get(name, owner)
        try:
            await asyncio.wait_for(future.done.wait(), WAIT_S)
        except TimeoutError:
            return None
        future.fetched_at = time.monotonic()
        return future.answer

    def forget(self, session: str | None = None) -> None:
        """Drop answers that were fetched, and all of a session that has ended."""
        now = time.monotonic()
        for name, future in list(self.by_id.items()):
            is_old = future.fetched_at is not None and now - future.fetched_at > KEPT_S
            if is_old or future.session == session:
                if future.task is not None:
                    future.task.cancel()
                future.fail("The session has ended.")
                del self.by_id[name]


async def answer(future: Future, work: Callable[[], Awaitable[Answer]]) -> None:
    """Give the future its answer, or the reason why there is none."""
    try:
        future.finish(await work())
    except Rejected as refusal:
        future.fail(refusal.reason)
    except asyncio.CancelledError:
        future.fail("The request was cancelled.")
        raise
