"""`skylite receive` in a thread of the test. `start` after `stop` is a restart at the same address."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skylite.engine.receiver import make_app
from skylite.processes.http_server import serving


@dataclass(slots=True)
class Receiver:
    folder: Path
    token: str = "sesame"
    options: dict[str, Any] = field(default_factory=dict)
    """uvicorn's, such as ssl_certfile."""
    port: int = 0
    _thread: threading.Thread | None = None
    _loop: asyncio.AbstractEventLoop = field(default_factory=asyncio.new_event_loop)
    _ended: asyncio.Event = field(default_factory=asyncio.Event)

    @property
    def url(self) -> str:
        return f"http{'s' if self.options else ''}://127.0.0.1:{self.port}"

    def start(self) -> None:
        listener = socket.create_server(("127.0.0.1", self.port))
        self.port = listener.getsockname()[1]
        self._loop, self._ended, ready = asyncio.new_event_loop(), asyncio.Event(), threading.Event()

        async def serve() -> None:
            app = make_app(self.folder, self.token)
            async with serving(app, [listener], http="h11", **self.options):
                ready.set()
                await self._ended.wait()

        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(serve(),), daemon=True)
        self._thread.start()
        assert ready.wait(10)

    def stop(self) -> None:
        if self._thread is not None:
            self._loop.call_soon_threadsafe(self._ended.set)
            self._thread.join(10)
            self._loop.close()
            self._thread = None

    @property
    def names(self) -> list[str]:
        """What lies in its folder."""
        return sorted(path.name for path in self.folder.iterdir())


@contextmanager
def receivers(folder: Path, count: int = 1, **options: Any) -> Iterator[list[Receiver]]:
    """Receive until the block ends, each in a folder of its own."""
    made = [Receiver(folder / f"host-{i}", options=options) for i in range(count)]
    for receiver in made:
        receiver.folder.mkdir(parents=True)
        receiver.start()
    try:
        yield made
    finally:
        for receiver in made:
            receiver.stop()
