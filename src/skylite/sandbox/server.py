"""The process behind a Sandbox: it prepares one function, then runs each call in a confined copy of itself.

A call gets a fresh process (fork), so no call can change the next one. The server isolates itself before it
imports the function, and its copies inherit that. Requests are trusted; what a copy answers is not, so it is
only passed on as bytes. Imports only the standard library.

If the function has a method `prepare`, this process calls it after the first answer, for work that later
calls need not repeat. The limits of a call hold for it.

Messages on the two pipes: 8 bytes with the length (big-endian), then JSON.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
import struct
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

from skylite.sandbox.confine import SETUP_BYTES, isolate, limit_call, lower_limit
from skylite.sandbox.scratch import empty, is_larger

SIZE_S = 0.1
"""How often the size of the scratch folder is checked."""
LENGTH = struct.Struct(">Q")
_F_SETSIG = 10
_ISOLATED = "isolated"


def main(life: int) -> NoReturn:
    """Serve until the parent closes the request pipe. `life`: a pipe whose end is the end of this process."""
    _die_with(life)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    request = _receive(requests)
    if request is None:
        os._exit(0)
    scratch = None if request["scratch"] is None else Path(request["scratch"])
    memory = os.open("/proc/self/statm", os.O_RDONLY)
    os.chdir(scratch or "/")
    lower_limit(resource.RLIMIT_AS, SETUP_BYTES)
    try:
        isolate([Path(p) for p in request["readable"]], scratch)
        _check_isolation(scratch)
    except OSError as error:
        send(replies, [_ISOLATED, error.strerror or str(error)])
        os._exit(1)
    try:
        module, _, name = request["factory"].partition(":")
        function = getattr(importlib.import_module(module), name)(*request["arguments"])
    except Exception as error:  # noqa: BLE001  # the parent raises it
        send(replies, ["raised", type(error).__name__, str(error)])
        os._exit(1)
    gc.collect()
    gc.freeze()  # a collection in a copy would copy every page
    send(replies, ["ready"])
    prepare = getattr(function, "prepare", None)
    while (request := _receive(requests)) is not None:
        if scratch is not None and not empty(scratch):
            send(replies, ["dirty"])
            continue
        reply = _call(function, request, memory, (requests, replies, memory, life), scratch)
        send(replies, reply)
        if prepare is not None and reply[0] == "answer":
            _prepare(prepare, request, memory)
            prepare = None
    os._exit(0)


def _die_with(life: int) -> None:
    """Let the kernel kill this process when the parent's end of the pipe is gone, also during an import."""
    import fcntl

    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        os._exit(1)


def _check_isolation(scratch: Path | None) -> None:
    """Try what must not work. Raises OSError if it does."""
    with contextlib.suppress(PermissionError):
        socket.socket().close()
        raise OSError(0, "a socket could be opened in the sandbox")
    with contextlib.suppress(PermissionError):
        os.close(os.open(f"/tmp/skylite-sandbox-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600))
        raise OSError(0, "a file could be written in the sandbox")


def _call(
    function: Callable[..., Any],
    request: dict[str, Any],
    memory: int,
    private: tuple[int, ...],
    scratch: Path | None,
) -> list[Any]:
    """Run the function in a copy of this process. Returns what the parent gets."""
    read_end, write_end = os.pipe()
    pages = int(os.pread(memory, 64, 0).split()[0])
    server, deadline = os.getpid(), time.monotonic() + request["wall_s"]
    pid = os.fork()
    if pid == 0:
        for descriptor in (*private, read_end):
            os.close(descriptor)
        memory_bytes = pages * os.sysconf("SC_PAGE_SIZE") + request["memory_bytes"]
        _answer(function, request, write_end, server, memory_bytes)
    os.close(write_end)
    try:
        data = _read_until(read_end, deadline, request, private[0], scratch)
    finally:
        os.close(read_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
    if isinstance(data, str):
        return [data]
    code = os.waitstatus_to_exitcode(status)
    if data and code in (0, -signal.SIGKILL):
        return ["answer", data.decode("utf-8", errors="replace")]
    return ["cpu"] if code == -signal.SIGXCPU else ["ended", code]


def _prepare(prepare: Callable[[], None], request: dict[str, Any], memory: int) -> None:
    """Call `prepare` here, within the limits of one call."""
    used, pages = resource.getrusage(resource.RUSAGE_SELF), int(os.pread(memory, 64, 0).split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + request["memory_bytes"],
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + 1 + request["cpu_s"],
    }
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, most in limits.items():
        lowest = [n for n in (most, *before[kind]) if n != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(lowest), before[kind][1]))
    with contextlib.suppress(Exception):  # then each call does the work itself
        prepare()
    for kind, values in before.items():
        resource.setrlimit(kind, values)
    gc.collect()
    gc.freeze()


def _answer(
    function: Callable[..., Any], request: dict[str, Any], pipe: int, server: int, memory_bytes: int
) -> NoReturn:
    """The copy: limit this process, call the function, write the answer, end."""
    try:
        limit_call(server, memory_bytes, request["cpu_s"], request["file_bytes"])
        answer = json.dumps(["value", function(*request["arguments"])])
    except MemoryError:
        answer = '["memory"]'
    except BaseException as error:  # noqa: BLE001  # SystemExit too: whatever it is, it is an answer
        answer = json.dumps(["raised", type(error).__name__, _text(error)])
    data = answer.encode()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]
    os._exit(0)


def _text(error: BaseException) -> str:
    try:
        return str(error)[:2000]
    except BaseException:  # noqa: BLE001  # the code of a class that nobody trusts
        return ""


def _read_until(
    pipe: int, deadline: float, limits: dict[str, Any], requests: int, scratch: Path | None
) -> bytes | str:
    """All bytes of the pipe, or the limit that the call broke: "time", "output" or "files".

    Ends with the parent.
    """
    data = bytearray()
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([pipe, requests], [], [], left if scratch is None else min(left, SIZE_S))
        if requests in ready:  # nothing is requested during a call, so the parent has closed the pipe
            os._exit(0)
        if scratch is not None and is_larger(scratch, limits["file_bytes"]):
            return "files"
        if not ready:
            if time.monotonic() >= deadline:
                return "time"
            continue
        chunk = os.read(pipe, 1 << 16)
        if not chunk:
            return bytes(data)
        data += chunk
        if len(data) > limits["output_bytes"]:
            return "output"


def make_nothing() -> Callable[[], None]:
    """The factory of a function that does nothing, to try whether this machine has a sandbox."""
    return lambda: None


def send(pipe: int, message: object) -> None:
    """Write one message."""
    body = json.dumps(message).encode()
    data = LENGTH.pack(len(body)) + body
    while data:
        data = data[os.write(pipe, data) :]


def _receive(pipe: int) -> dict[str, Any] | None:
    """The next request; None when the parent has closed the pipe."""
    header = _read_exactly(pipe, LENGTH.size)
    if header is None:
        return None
    body = _read_exactly(pipe, LENGTH.unpack(header)[0])
    return None if body is None else json.loads(body)


def _read_exactly(pipe: int, count: int) -> bytes | None:
    data = bytearray()
    while len(data) < count:
        chunk = os.read(pipe, count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)
