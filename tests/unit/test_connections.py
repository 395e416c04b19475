"""A step with thousands of prompts needs few connections, and few open files."""

from __future__ import annotations

import asyncio
import json
import resource
import subprocess
import sys
from pathlib import Path

import pytest

from skylite.engine.client import VllmClient
from skylite.processes.file_descriptors import raise_file_limit
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
        client = VllmClient("vllm-0", tmp_path / "s", max_connections=20)
        requests = [asyncio.ensure_future(client.sample("m", [1], 1, SAMPLING, 1)) for _ in range(PROMPTS)]
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


RAISE = """
import resource, sys
from skylite.errors import ConfigError
from skylite.processes.file_descriptors import raise_file_limit
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
