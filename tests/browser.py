"""A real headless Chromium, driven over its DevTools pipe: opens a page, runs JavaScript, takes pictures."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
TIMEOUT_S = 120.0


class Page:
    """An open page. `events` holds what Chromium reported: requests, console messages, exceptions."""

    def __init__(self, write: int, read: int) -> None:
        self._write, self._read = write, read
        self._numbers = itertools.count(1)
        self._rest = b""
        self._session: str | None = None
        self.events: list[dict[str, Any]] = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Page", "Network", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """Send a command and wait for its result."""
        number = next(self._numbers)
        message: dict[str, Any] = {"id": number, "method": method, "params": parameters}
        if self._session is not None:
            message["sessionId"] = self._session
        os.write(self._write, json.dumps(message).encode() + b"\0")
        while True:
            reply = self._message()
            if reply.get("id") == number:
                assert "error" not in reply, reply["error"]
                result: dict[str, Any] = reply["result"]
                return result
            self.events.append(reply)

    def open(self, path: Path, *, width: int = 1200, height: int = 900, dark: bool = False) -> None:
        """Load a file in a window of this size and wait until it is loaded."""
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.call("Page.navigate", url=path.as_uri())
        deadline = time.monotonic() + TIMEOUT_S
        while self.run("document.readyState") != "complete" or self.run("location.href") == "about:blank":
            assert time.monotonic() < deadline, "the page did not load"
            time.sleep(0.05)

    def run(self, javascript: str) -> Any:
        """The value of an expression."""
        result = self.call("Runtime.evaluate", expression=javascript, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in result, result
        return result["result"].get("value")

    def picture(self, path: Path, *, whole: bool = True) -> None:
        data = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)["data"]
        path.write_bytes(base64.b64decode(data))

    def requests(self) -> list[str]:
        """The addresses that the page asked for."""
        return [
            e["params"]["request"]["url"]
            for e in self.events
            if e.get("method") == "Network.requestWillBeSent"
        ]

    def errors(self) -> list[str]:
        """Exceptions, and messages of the log such as violations of the content security policy."""
        kinds = ("Runtime.exceptionThrown", "Log.entryAdded")
        return [json.dumps(e["params"]) for e in self.events if e.get("method") in kinds]

    def _message(self) -> dict[str, Any]:
        deadline = time.monotonic() + TIMEOUT_S
        while b"\0" not in self._rest:
            left = deadline - time.monotonic()
            ready = left > 0 and select.select([self._read], [], [], left)[0]
            assert ready, "Chromium does not answer"
            chunk = os.read(self._read, 1 << 20)
            assert chunk, "Chromium ended"
            self._rest += chunk
        first, self._rest = self._rest.split(b"\0", 1)
        message: dict[str, Any] = json.loads(first)
        return message


@contextmanager
def browser(folder: Path) -> Iterator[Page]:
    """A browser with a fresh profile in `folder`."""
    assert CHROMIUM is not None
    from_us, to_us = os.pipe(), os.pipe()

    def place() -> None:
        # Chromium reads commands from 3 and writes to 4. Copies first: 3 or 4 may be among the pipes' ends.
        reader, writer = os.dup(from_us[0]), os.dup(to_us[1])
        high_reader, high_writer = os.dup2(reader, 60), os.dup2(writer, 61)
        os.dup2(high_reader, 3)
        os.dup2(high_writer, 4)

    command = [
        CHROMIUM, "--headless", "--no-sandbox", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run",
        "--disable-dev-shm-usage", "--hide-scrollbars", f"--user-data-dir={folder / 'profile'}",
    ]  # fmt: skip
    process = subprocess.Popen(
        command, preexec_fn=place, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(from_us[0])
    os.close(to_us[1])
    try:
        yield Page(from_us[1], to_us[0])
    finally:
        process.terminate()
        process.wait(30)
        os.close(from_us[1])
        os.close(to_us[0])
