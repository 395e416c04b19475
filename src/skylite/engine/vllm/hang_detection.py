"""Detects that an engine hangs. The watchdog then restarts it."""

from __future__ import annotations

import asyncio

from skylite.engine.retrying_client import Engine
from skylite.errors import EngineDead, EngineFailed

PROGRESS_POLL_S = 1.0
"""Longest interval between two checks of an engine's progress."""


async def wait_for_hang(engine: Engine, stall_timeout_s: float) -> EngineFailed:
    """Return the reason once the engine fails.

    It fails if it reports so, or if it does not answer or generates no token for `stall_timeout_s` while
    requests are in flight. /health is not enough: it stays 200 while the engine process hangs. The token
    count in /metrics covers all requests, so a request that waits in the queue is no hang. Streaming would
    detect hangs too, but costs time for every token.
    """
    clock = asyncio.get_running_loop().time
    tokens, since = -1.0, clock()
    failure: EngineFailed | None = None
    while clock() - since <= stall_timeout_s:
        engine.note_work(since)
        await asyncio.sleep(min(PROGRESS_POLL_S, stall_timeout_s / 4))
        try:
            now, failure = await engine.token_count(), None
        except EngineDead as error:
            return error
        except EngineFailed as error:
            failure = error
            continue
        if now != tokens or engine.in_flight == 0:
            tokens, since = now, clock()
    return failure or EngineFailed(
        f"{engine.name} generated no token for {stall_timeout_s:g} s while {engine.in_flight} requests "
        "waited, and /health reports no problem."
    )
