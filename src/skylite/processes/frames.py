"""Messages between the service's front and its trainer over a Unix socket: JSON, and arrays as raw bytes.

Nothing in a message is code: an array names one of DTYPES, and its bytes follow.
"""

from __future__ import annotations

import asyncio
import json
import socket
import struct
from typing import Any

import numpy as np
import numpy.typing as npt

HEAD = struct.Struct("<QQ")
"""Bytes of the JSON, bytes of all arrays."""
DTYPES = ("int64", "float32")
_ARRAY = "array"


def encode_frame(message: dict[str, Any]) -> bytes:
    """A message as bytes. Its arrays have one dimension, and a dtype of DTYPES."""
    arrays: list[bytes] = []

    def replace_array(value: object) -> dict[str, Any]:
        if not isinstance(value, np.ndarray) or value.ndim != 1 or value.dtype.name not in DTYPES:
            raise TypeError(f"a message holds no {type(value).__name__}")
        arrays.append(value.tobytes())
        return {_ARRAY: [value.dtype.name, len(value)]}

    text = json.dumps(message, default=replace_array).encode()
    return b"".join([HEAD.pack(len(text), sum(map(len, arrays))), text, *arrays])


def decode_frame(text: bytes, body: bytes) -> dict[str, Any]:
    """The message. JSON is read inside out and in order, as it was written, so arrays come one after the
    other."""
    position = 0

    def take_array(value: dict[str, Any]) -> Any:
        nonlocal position
        if _ARRAY not in value:
            return value
        name, length = value[_ARRAY]
        if name not in DTYPES:
            raise ValueError(f"a message holds no array of {name}")
        array: npt.NDArray[Any] = np.frombuffer(body, np.dtype(name), length, position).copy()
        position += array.nbytes
        return array

    message: dict[str, Any] = json.loads(text, object_hook=take_array)
    return message


def send_frame(stream: socket.socket, message: dict[str, Any]) -> None:
    """Send a message, blocking."""
    stream.sendall(encode_frame(message))


def receive_frame(stream: socket.socket) -> dict[str, Any] | None:
    """The next message, blocking; None at the end of the stream."""
    head = _receive(stream, HEAD.size)
    if head is None:
        return None
    sizes = HEAD.unpack(head)
    text, body = _receive(stream, sizes[0]), _receive(stream, sizes[1])
    return None if text is None or body is None else decode_frame(text, body)


async def read_frame(reader: asyncio.StreamReader) -> dict[str, Any]:
    """The next message. Raises asyncio.IncompleteReadError at the end of the stream."""
    sizes = HEAD.unpack(await reader.readexactly(HEAD.size))
    return decode_frame(await reader.readexactly(sizes[0]), await reader.readexactly(sizes[1]))


def _receive(stream: socket.socket, size: int) -> bytes | None:
    buffer, done = bytearray(size), 0
    view = memoryview(buffer)
    while done < size:
        received = stream.recv_into(view[done:])
        if not received:
            return None
        done += received
    return bytes(buffer)
