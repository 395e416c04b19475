"""Other users' connections: dropped before anything is read; slow and large headers end."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import httpx
import pytest
import uvicorn

from skylite.environments.episodes_source import Episodes
from skylite.processes import own_peers
from skylite.processes.own_peers import OwnPeersProtocol, may_connect, peer_uid
from tests.other_user import OTHER, as_other_user, as_root, folder_of_all
from tests.unit.environment_cases import ScriptedEngine
from tests.unit.test_openai_server import HELLO, open_log, post, visit

READ: list[bytes] = []


async def app(scope: Any, receive: Any, send: Any) -> None:
    READ.append(scope["path"].encode())
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"6")]})
    await send({"type": "http.response.body", "body": b"served"})


@contextlib.contextmanager
def serving(*sockets: socket.socket) -> Iterator[uvicorn.Server]:
    """A server with the protocol, in a thread."""
    READ.clear()
    config = uvicorn.Config(
        app,
        http=OwnPeersProtocol,
        lifespan="off",
        log_config=None,
    )
    server = uvicorn.Server(config)
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=list(sockets))), daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield server
    finally:
        server.should_exit = server.force_exit = True
        thread.join(10)


@pytest.fixture
def tcp() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as server:
        yield server


def ask(address: Any, family: int = socket.AF_INET) -> bytes:
    """The whole answer to a request; empty if the server ends the connection."""
    with socket.socket(family) as client:
        client.settimeout(10)
        client.connect(address)
        with contextlib.suppress(ConnectionError):
            client.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
            parts = []
            while part := client.recv(4096):
                parts.append(part)
            return b"".join(parts)
        return b""


@as_root
def test_other_users_are_dropped_at_the_port_and_at_the_socket(tcp: socket.socket) -> None:
    def stranger(address: Any, family: int) -> None:
        assert ask(address, family) == b""

    with folder_of_all() as folder, socket.socket(socket.AF_UNIX) as unix:
        unix.bind(str(folder / "s"))
        unix.listen()
        os.chmod(folder / "s", 0o777)
        with serving(tcp, unix):
            for address, family in ((tcp.getsockname(), socket.AF_INET), (str(folder / "s"), socket.AF_UNIX)):
                assert as_other_user(partial(stranger, address, family)) == 0
                assert READ == []
                assert ask(address, family).endswith(b"served")
                READ.clear()


@as_root
def test_idle_connections_of_another_user_take_no_descriptors(tcp: socket.socket) -> None:
    def open_many() -> None:
        clients = [socket.socket() for _ in range(300)]
        for client in clients:
            client.connect(tcp.getsockname())
        time.sleep(1)

    with serving(tcp) as server:
        ask(tcp.getsockname())
        before = len(os.listdir("/proc/self/fd"))
        assert as_other_user(open_many) == 0
        deadline = time.monotonic() + 20
        while len(os.listdir("/proc/self/fd")) > before and time.monotonic() < deadline:
            time.sleep(0.05)
        assert len(os.listdir("/proc/self/fd")) <= before
        assert not server.server_state.connections
        assert ask(tcp.getsockname()).endswith(b"served")


def test_headers_are_bounded_before_the_key_is_checked(tmp_path: Path) -> None:
    """The fault: a client without a key filled the memory with one endless header."""

    async def body(running: Episodes) -> None:
        port = int(running.server.base_url.rpartition(":")[2].partition("/")[0])
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(b"POST /v1/chat/completions HTTP/1.1\r\nHost: x\r\nX: ")
        sent = 0
        with contextlib.suppress(ConnectionError):
            while sent < 64 << 20:
                writer.write(b"x" * 65536)
                await writer.drain()
                sent += 65536
            pytest.fail("the server read 64 MiB of headers")
        writer.close()
        server, engine = running.server, ScriptedEngine(lambda p: "good day")
        _, key = open_log(server, engine)
        reply = await post(server, key, {"messages": HELLO, "model": "m"})
        assert reply.status_code == httpx.codes.OK

    visit(tmp_path, body)


def test_a_connection_without_a_request_ends(tcp: socket.socket, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(own_peers, "HEADERS_S", 0.3)
    with serving(tcp), socket.create_connection(tcp.getsockname(), timeout=10) as slow:
        slow.sendall(b"GET /x HTTP/1.1\r\nHost: ")
        with contextlib.suppress(ConnectionError):
            assert slow.recv(1) == b""
        with socket.create_connection(tcp.getsockname(), timeout=10) as served:
            for _ in range(2):  # an answered connection stays
                served.sendall(b"GET /x HTTP/1.1\r\nHost: x\r\n\r\n")
                answer = b""
                while not answer.endswith(b"served"):
                    part = served.recv(4096)
                    assert part, "the connection ended"
                    answer += part
                time.sleep(0.5)


@pytest.mark.parametrize("host", ["127.0.0.1", "::1", "::ffff:127.0.0.1"])
def test_the_owner_of_a_connection_is_found(host: str) -> None:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    with socket.socket(family) as server:
        try:
            server.bind((host, 0))
        except OSError:
            pytest.skip("no IPv6 here")
        server.listen()
        with socket.socket(family) as client:
            client.connect(server.getsockname())
            accepted, peer = server.accept()
            with accepted:
                assert peer_uid(family, peer, accepted.getsockname()) == os.geteuid()
                client.close()
                time.sleep(0.05)
                assert peer_uid(family, peer, accepted.getsockname()) is None, "nobody holds it any more"


@pytest.mark.parametrize(
    ("peer", "uid", "allowed"),
    [
        ("127.0.0.1", os.geteuid(), True),
        ("127.0.0.1", 0, True),
        ("127.0.0.1", OTHER, False),
        ("127.0.0.1", None, False),
        ("::ffff:127.0.0.9", None, False),
        ("::1", None, False),
        ("10.0.0.7", None, True),
        ("10.0.0.7", OTHER, False),
    ],
)
def test_who_may_connect(peer: str, uid: int | None, allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A peer on another machine has no owner here: `skylite serve --host` lets it come to the key."""
    monkeypatch.setattr(own_peers, "peer_uid", lambda *_: uid)
    with socket.socket() as own:
        extra = {"peername": (peer, 1), "socket": own}
        transport: Any = SimpleNamespace(get_extra_info=extra.get)
        assert may_connect(transport) is allowed


def test_vllms_server_takes_the_protocol() -> None:
    """As vLLM does: import the middleware, then load uvicorn's configuration."""
    code = (
        "import json, importlib, uvicorn\n"
        "from skylite.engine.vllm.launcher import SERVE_MIDDLEWARE\n"
        "module, name = SERVE_MIDDLEWARE.rsplit('.', 1)\n"
        "found = getattr(importlib.import_module(module), name)\n"
        "config = uvicorn.Config(lambda: None)\n"
        "config.load()\n"
        "print(json.dumps([found.__name__, config.http_protocol_class.__name__]))\n"
    )
    reply = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert json.loads(reply.stdout) == ["RequireKey", "OwnPeersProtocol"]
