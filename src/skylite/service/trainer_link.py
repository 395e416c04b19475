"""The front's side of the trainer's socket. Commands of all clients go one at a time."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skylite.processes.frames import encode_frame, read_frame
from skylite.service.errors import Rejected


@dataclass(slots=True)
class TrainerLink:
    """Commands to rank 0. They wait for each other in the order in which they came.

    A policy sends its next command after the answer to its last one, so turns go round the policies.
    """

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    choices: list[str]
    """How the trainer computes the model."""
    _turn: asyncio.Lock = field(default_factory=asyncio.Lock)

    async def command(self, verb: str, **values: Any) -> Any:
        """What the trainer gives. Raises Rejected if it refuses.

        A command that is cancelled is carried out all the same: its reply is read before the next one.
        """
        return await asyncio.shield(self._command({"verb": verb, **values}))

    async def _command(self, message: dict[str, Any]) -> Any:
        async with self._turn:
            try:
                self.writer.write(encode_frame(message))
                await self.writer.drain()
                reply = await read_frame(self.reader)
            except (OSError, asyncio.IncompleteReadError):
                raise Rejected("The trainer has ended; the service stops.", 500) from None
        if "refused" in reply:
            raise Rejected(reply["refused"])
        return reply["done"]


@asynccontextmanager
async def trainer_at(path: Path) -> AsyncIterator[asyncio.Future[TrainerLink]]:
    """Listen at `path`. The future is the link, once rank 0 has connected and loaded the base."""
    linked: asyncio.Future[TrainerLink] = asyncio.get_running_loop().create_future()

    async def connected(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        hello = await read_frame(reader)
        if not linked.done():
            linked.set_result(TrainerLink(reader, writer, hello["choices"]))

    server = await asyncio.start_unix_server(connected, path)
    try:
        yield linked
    finally:
        server.close()
        if linked.done() and not linked.cancelled():
            linked.result().writer.close()
