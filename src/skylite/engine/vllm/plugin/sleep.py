"""ASGI middleware for engines that sleep: two routes, at which vLLM lends its memory and takes it again.

vLLM has such routes behind VLLM_SERVER_DEV_MODE alone, beside one that runs any function in its workers.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, MutableMapping
from http import HTTPStatus
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

SLEEP, WAKE = "/skylite/sleep", "/skylite/wake"
"""POST. SLEEP reads {"lends": "kv_cache" | "weights"}."""


class SleepRoutes:
    """Answers SLEEP and WAKE, and passes everything else on."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"] not in (SLEEP, WAKE) or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        # vLLM has starlette. The client, which imports this file for the names above, needs none.
        from starlette.requests import Request
        from starlette.responses import JSONResponse

        engine, status, answer = scope["app"].state.engine_client, HTTPStatus.OK, dict[str, str]()
        try:
            if scope["path"] == SLEEP:
                await fall_asleep(engine, (await Request(scope, receive).json())["lends"])
            else:
                await engine.wake_up()
        except Exception as error:  # noqa: BLE001 -- whatever vLLM raises, the client gets its words
            status, answer = HTTPStatus.INTERNAL_SERVER_ERROR, {"error": f"{type(error).__name__}: {error}"}
        await JSONResponse(answer, status)(scope, receive, send)


async def fall_asleep(engine: Any, lends: str) -> None:
    """Drop all requests and the prefix cache, and give the memory back.

    Args:
        engine: vLLM's AsyncLLM.
        lends: kv_cache, of which nothing is copied, or weights: these and the adapters go to the machine's
            memory (sleep level 1; level 2 would lose the adapters).
    """
    if lends == "weights":
        await engine.sleep(level=1, mode="abort")
        return
    if lends != "kv_cache":
        raise ValueError(f"lends is {lends!r}")
    await engine.pause_generation(mode="abort", clear_cache=True)
    await engine.release_kv_cache_memory()
