"""An HTTP server for this user's processes: connections of other users end before a byte of theirs is read.

Any user of the machine can connect to a port of the loopback interface, and could use up the server's open
files and its memory before the first key is checked.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from pathlib import Path
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

PROTOCOL = f"{__name__}:OwnPeersProtocol"
"""Its name for uvicorn."""
HEADERS_S = 20.0
"""Time for the first request's headers to arrive."""
CONNECTIONS = Path("/proc/net")


class OwnPeersProtocol(H11Protocol):
    """Drops connections of other users, and those that send no request within HEADERS_S."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        if not may_connect(transport):
            transport.abort()
            return
        self._headers = self.loop.call_later(HEADERS_S, self._end_if_silent)

    def connection_lost(self, exc: Exception | None) -> None:
        if hasattr(self, "_headers"):
            self._headers.cancel()
        super().connection_lost(exc)

    def _end_if_silent(self) -> None:
        if self.cycle is None:
            self.transport.abort()


def may_connect(transport: asyncio.Transport) -> bool:
    """Whether the peer is a process of this user, of root, or of another machine."""
    peer = transport.get_extra_info("peername")
    with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as own:
        if own.family == socket.AF_UNIX:
            credentials = own.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize("3i"))
            return _is_trusted(struct.unpack("3i", credentials)[1])
        if not peer:  # it has gone already
            return False
        uid = peer_uid(own.family, peer, own.getsockname())
    return _is_trusted(uid) if uid is not None else not _is_loopback(peer[0])


def peer_uid(family: int, peer: tuple[Any, ...], own: tuple[Any, ...]) -> int | None:
    """Owner of the process at the other end of a TCP connection on this machine; None if there is none."""
    for name, as_mapped in (("tcp", False), ("tcp6", True)):
        ends = f" {_address(family, peer, as_mapped)} {_address(family, own, as_mapped)} "
        try:
            table = (CONNECTIONS / name).read_text(encoding="ascii")
        except OSError:
            continue
        start = table.find(ends)
        if start >= 0:
            fields = table[start : table.find("\n", start)].split()
            return int(fields[6]) if fields[8] != "0" else None  # without an inode nobody holds it
    return None


def _address(family: int, address: tuple[Any, ...], as_mapped: bool) -> str:
    """As the kernel writes it: words of 32 bits in the machine's order, and the port."""
    packed = socket.inet_pton(family, address[0].partition("%")[0])
    if len(packed) == 4 and as_mapped:
        packed = bytes(10) + b"\xff\xff" + packed
    elif len(packed) == 16 and not as_mapped:
        packed = packed[12:]
    words = struct.unpack(f"={len(packed) // 4}I", packed)
    return f"{''.join(f'{word:08X}' for word in words)}:{address[1]:04X}"


def _is_trusted(uid: int) -> bool:
    return uid in (os.geteuid(), 0)


def _is_loopback(host: str) -> bool:
    return host.removeprefix("::ffff:").startswith("127.") or host == "::1"
