"""A misbehaving vLLM server on a Unix socket, and the requests that tests send to it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

from skylite.engine.connections import Address
from skylite.engine.interface import Sampling
from skylite.engine.vllm.client import VllmClient
from skylite.types import EncodedPrompt

SAMPLING = Sampling(temperature=1.0, top_p=1.0, top_k=0, max_tokens=4, stop_token_ids=(), seed=40)
Behaviour = Callable[[asyncio.StreamWriter, int], Awaitable[None]]


def choice(index: int = 0, prompt: Sequence[int] = (7, 8), **changes: Any) -> dict[str, Any]:
    good = {
        "index": index,
        "text": "ab",
        "prompt_token_ids": list(prompt),
        "token_ids": [1, 2],
        "logprobs": {"token_logprobs": [-1.0, -2.0]},
        "finish_reason": "stop",
    }
    return good | changes


async def talk(
    folder: Path,
    behave: Behaviour,
    ask: Callable[[VllmClient], Awaitable[Any]],
    timeout_s: float = 1.0,
    seen: list[tuple[str, str]] | None = None,
) -> Any:
    """Run `ask` against a server with this behaviour. `behave` also gets the number of earlier requests.

    `seen` receives the first line and the body of each request.
    """
    count = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal count
        try:
            head = await reader.readuntil(b"\r\n\r\n")
            length = next(
                (
                    int(line.split(b":")[1])
                    for line in head.lower().split(b"\r\n")
                    if line.startswith(b"content-length")
                ),
                0,
            )
            body = await reader.readexactly(length)
            if seen is not None:
                seen.append((head.partition(b" HTTP")[0].decode(), body.decode()))
            number, count = count, count + 1
            await behave(writer, number)
            await writer.drain()
        except (ConnectionError, asyncio.IncompleteReadError, asyncio.CancelledError):
            pass
        finally:
            writer.close()

    server = await asyncio.start_unix_server(serve, folder / "s")
    client = VllmClient("engine-0", Address.of_socket(folder / "s"), request_timeout_s=timeout_s)
    try:
        return await ask(client)
    finally:
        await client.aclose()
        server.close()


def ask_for(n: int) -> Callable[[VllmClient], Awaitable[Any]]:
    return lambda client: client.generate("m", EncodedPrompt([7, 8]), n, SAMPLING, version=3)
