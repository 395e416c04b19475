"""ASGI middleware for `skylite serve`: every route requires the API key.

vLLM's own check covers only /v1 and a few other prefixes: without a key, /invocations serves completions, and
/tokenize, /metrics and others disclose information. Every user of the machine can reach the loopback
interface.
"""

from __future__ import annotations

import hashlib
import os
import secrets
from collections.abc import Awaitable, Callable, MutableMapping
from typing import Any

Message = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[Message]]
Send = Callable[[Message], Awaitable[None]]
App = Callable[[Message, Receive, Send], Awaitable[None]]

KEY_VARIABLE = "VLLM_API_KEY"
"""Environment variable in which users choose the key of a server, or give it to a client."""
SERVER_VARIABLE = "SKYLITE_API_KEY"
"""Environment variable that gives the key to the server. An argument would be visible in the process list.

Not KEY_VARIABLE: vLLM 0.26 counts that as part of what it compiled, so that with a random key it compiles at
every start, and writes its hash beside the compiled code.
"""
PUBLIC_PATHS = frozenset({"/health"})
"""Paths without a key: /health only shows that the server is up."""


class RequireKey:
    """Responds 401 to requests without `Authorization: Bearer KEY`. Raises KeyError if no key is set."""

    def __init__(self, app: App) -> None:
        self._app = app
        self._key = hashlib.sha256(os.environ[SERVER_VARIABLE].encode()).digest()

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
