"""ASGI middleware for `skylite serve`: every route requires the API key. Only vLLM imports it, by its name.

vLLM's own check covers only /v1 and a few other prefixes: without a key, /invocations serves completions, and
/tokenize, /metrics and others disclose information. Every user of the machine can reach the loopback
interface. vLLM imports this before it chooses the HTTP protocol of its server, for which it has no flag.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

from uvicorn.config import HTTP_PROTOCOLS

from skylite.engine.connections import KEY_VARIABLE
from skylite.processes.own_peers import PROTOCOL

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

PUBLIC_PATHS = frozenset({"/health"})
"""Paths without a key: /health only shows that the server is up."""


HTTP_PROTOCOLS["auto"] = PROTOCOL


class RequireKey:
    """Responds 401 to requests without `Authorization: Bearer KEY`. Raises KeyError if no key is set."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = hashlib.sha256(os.environ[KEY_VARIABLE].encode()).digest()

    async def __call__(self, scope: Message, receive: Receive, send: Send) -> None:
        if (
            scope["type"] in ("http", "websocket")
            and scope["path"] not in PUBLIC_PATHS
            and not self._has_key(scope)
        ):
            if scope["type"] == "websocket":
                await send({"type": "websocket.close", "code": 1008})
                return
            body = b'{"error": "Unauthorized"}'
            headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
            await send({"type": "http.response.start", "status": 401, "headers": headers})
            await send({"type": "http.response.body", "body": body})
            return
        await self._app(scope, receive, send)

    def _has_key(self, scope: Message) -> bool:
        given = dict(scope["headers"]).get(b"authorization", b"")
        scheme, _, key = given.partition(b" ")
        return scheme.lower() == b"bearer" and secrets.compare_digest(hashlib.sha256(key).digest(), self._key)
