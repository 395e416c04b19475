"""Messages between the processes of a sandbox: 8 bytes with the length (big-endian), then JSON."""

from __future__ import annotations

import json
import os
import select
import struct
import time

LENGTH = struct.Struct(">Q")


def send(pipe: int, message: object) -> None:
    """Write one message."""
    data = with_length(json.dumps(message).encode())
    while data:
        data = data[os.write(pipe, data) :]


def with_length(body: bytes) -> bytes:
    """A message for a pipe. `body`: its JSON."""
    return LENGTH.pack(len(body)) + body


def receive(pipe: int) -> bytes | None:
    """The JSON of the next message; None when the sender has closed the pipe."""
    header = _read_exactly(pipe, LENGTH.size)
    return None if header is None else _read_exactly(pipe, LENGTH.unpack(header)[0])


def receive_until(pipe: int, deadline: float) -> bytes:
    """As `receive`. Raises EOFError if the sender has closed the pipe, TimeoutError at the deadline."""
    (length,) = LENGTH.unpack(_read_until(pipe, LENGTH.size, deadline))
    return _read_until(pipe, length, deadline)


def _read_until(pipe: int, count: int, deadline: float) -> bytes:
    data, waiting = bytearray(), select.poll()  # select() fails for descriptors from 1024 on
    waiting.register(pipe, select.POLLIN)
    while len(data) < count:
        if not waiting.poll(max(0.0, deadline - time.monotonic()) * 1000):
            raise TimeoutError("the sandbox does not answer")
        chunk = os.read(pipe, count - len(data))
        if not chunk:
            raise EOFError
        data += chunk
    return bytes(data)


def _read_exactly(pipe: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(pipe, count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
