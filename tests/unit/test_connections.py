"""A step with thousands of prompts needs few connections, and few open files."""

from __future__ import annotations

import asyncio
import json
import resource
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.connections import Address
from skylite.engine.vllm.client import VllmClient
from skylite.errors import EngineFailed
from skylite.processes.streams import raise_file_limit
from skylite.types import EncodedPrompt
from tests.unit.bad_server import SAMPLING, choice

PROMPTS = 600
BODY = json.dumps({"model": "m", "choices": [choice(prompt=[1])]}).encode()


class CountingServer:
    """Answers slowly on kept connections, and counts the open ones. /health is answered at once."""

    def __init__(self) -> None:
        self.now = self.most = 0

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.now += 1
        self.most = max(self.most, self.now)
        try:
            while head := await reader.readuntil(b"\r\n\r\n"):
                length = [line for line in head.lower().split(b"\r\n") if line.startswith(b"content-length")]
                await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                if b"/health" not in head:
                    await asyncio.sleep(0.05)
                writer.write(f"HTTP/1.1 200 X\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
        except (ConnectionError, asyncio.IncompleteReadError):
            pass
        finally:
            self.now -= 1
            writer.close()


def test_thousands_of_prompts_share_few_connections(tmp_path: Path) -> None:
    server = CountingServer()

    async def sample_all() -> tuple[int, float]:
        listening = await asyncio.start_unix_server(server.serve, tmp_path / "s", backlog=100)
        client = VllmClient("engine-0", Address.of_socket(tmp_path / "s"), max_connections=20)
        requests = [
            asyncio.ensure_future(client.generate("m", EncodedPrompt([1]), 1, SAMPLING, 1))
            for _ in range(PROMPTS)
        ]
        await asyncio.sleep(0.2)
        started = asyncio.get_running_loop().time()
        assert await client.is_ready(), "the watchdog must not wait behind the prompts"
        waited = asyncio.get_running_loop().time() - started
        found = await asyncio.gather(*requests)
        await client.aclose()
        await asyncio.sleep(0.1)
        assert server.now == 0, "the client closed all of its connections"
        listening.close()
        return sum(len(f) for f in found), waited

    count, waited = asyncio.run(sample_all())
    assert count == PROMPTS
    assert waited < 1.5
    assert 20 <= server.most <= 20 + 4


def test_a_request_cancelled_while_its_reply_arrives_leaves_no_error(tmp_path: Path) -> None:
    """As a stop and a timeout do, in the same round of the event loop."""
    reported: list[dict[str, Any]] = []

    async def cancel_at_the_reply() -> None:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: reported.append(context))
        with socket.socket(socket.AF_UNIX) as listening:
            listening.bind(str(tmp_path / "s"))
            listening.listen()
            client = VllmClient("engine-0", Address.of_socket(tmp_path / "s"))
            request = asyncio.ensure_future(client.generate("m", EncodedPrompt([1]), 1, SAMPLING, 1))
            with (await asyncio.to_thread(listening.accept))[0] as server:
                while not await asyncio.to_thread(server.recv, 65536):
                    pass
                server.sendall(f"HTTP/1.1 200 X\r\nContent-Length: {len(BODY)}\r\n\r\n".encode() + BODY)
                loop.call_soon(request.cancel)
                await asyncio.wait({request})
                await asyncio.sleep(0.05)
            assert request.cancelled()
            await client.aclose()

    asyncio.run(cancel_at_the_reply())
    assert reported == []


def test_requests_end_when_their_client_is_closed(tmp_path: Path) -> None:
    async def close_under_a_request() -> None:
        async def silence(reader: asyncio.StreamReader, _: asyncio.StreamWriter) -> None:
            asked.set()
            await reader.read()

        asked = asyncio.Event()
        async with await asyncio.start_unix_server(silence, tmp_path / "s"):
            client = VllmClient("engine-0", Address.of_socket(tmp_path / "s"))
            request = asyncio.ensure_future(client.generate("m", EncodedPrompt([1]), 1, SAMPLING, 1))
            await asked.wait()
            await asyncio.sleep(0.05)
            await client.aclose()
            with pytest.raises(EngineFailed, match="no complete reply"):
                await asyncio.wait_for(request, 5)

    asyncio.run(close_under_a_request())


RAISE = """
import resource, sys
from skylite.errors import ConfigError
from skylite.processes.streams import raise_file_limit
resource.setrlimit(resource.RLIMIT_NOFILE, (int(sys.argv[1]), int(sys.argv[2])))
try:
    raise_file_limit(int(sys.argv[3]))
except ConfigError as error:
    print(error)
print(resource.getrlimit(resource.RLIMIT_NOFILE)[0])
"""


def raised(soft: int, hard: int, needed: int) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", RAISE, str(soft), str(hard), str(needed)],
        capture_output=True,
        text=True,
        check=True,
    )
    return done.stdout.splitlines()


def test_the_soft_limit_of_open_files_is_raised_up_to_the_hard_one() -> None:
    hard = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    if hard < 2048:
        pytest.skip("the hard limit of this machine is low")
    assert raised(256, 2048, 700) == ["700"]
    assert raised(1024, 2048, 700) == ["1024"]
    text, limit = raised(64, 128, 700)
    assert limit == "64"
    assert "needs 700 open files" in text
    assert "ulimit -n is 128 at most" in text
    raise_file_limit(1)
