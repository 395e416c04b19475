"""The process behind a Sandbox: it prepares one function, then runs each call in a confined copy of itself.

The server isolates itself before it imports the function, and its copies (forks) inherit that. Requests are
trusted; what a copy answers is not, so it is only passed on as bytes. Imports only the standard library.

A message is 8 bytes with the length (big-endian), then JSON.

With `lasting` it runs the calls itself: then its replies are not trusted either, and the parent limits their
size and their time.
"""

from __future__ import annotations

import contextlib
import fcntl
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
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from skylite.processes.reaper import die_with_parent
from skylite.sandbox.confine import SETUP_BYTES, isolate, limit_call, limit_cpu, lower_limit

LENGTH = struct.Struct(">Q")
END = b"\n"
"""Ends an answer. JSON in one line contains none."""
_F_SETSIG = 10
_ISOLATED = "isolated"


def main(life: int) -> NoReturn:
    """Serve until the parent closes the request pipe. When `life`, a pipe, closes, it ends too."""
    _die_with(life)
    for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)  # the parent decides
    requests, replies = os.dup(0), os.dup(1)
    null = os.open(os.devnull, os.O_RDWR)
    for descriptor in (0, 1, 2):
        os.dup2(null, descriptor)
    setup = receive(requests)
    if setup is None:
        os._exit(0)
    request = json.loads(setup)
    memory = os.open("/proc/self/statm", os.O_RDONLY)
    os.chdir("/")
    lower_limit(resource.RLIMIT_AS, SETUP_BYTES)
    try:
        isolate([Path(p) for p in request["readable"]])
        _check_isolation()
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
    server = _Server(function, request["limits"], memory, requests, replies, life)
    if request["lasting"]:
        server.answer_here()
    server.serve()


@dataclass(frozen=True, slots=True)
class _Server:
    """Answers requests of one message, the arguments of a call."""

    function: Callable[..., Any]
    limits: dict[str, Any]
    """Of each call: the fields of sandbox.Limits."""
    memory: int
    """/proc/self/statm, open."""
    requests: int
    """The parent's pipe. When it closes, this process ends."""
    replies: int
    life: int

    def serve(self) -> NoReturn:
        """Run each call in a copy of this process."""
        while (arguments := receive(self.requests)) is not None:
            send(self.replies, self._call(arguments))
        os._exit(0)

    def answer_here(self) -> NoReturn:
        """Limit this process and run the calls in it, until one breaks a limit."""
        limit_call(self._address_space())
        os.close(self.memory)
        while (arguments := receive(self.requests)) is not None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit_cpu(int(used.ru_utime + used.ru_stime) + 1 + self.limits["cpu_s"])
            send_bytes(self.replies, _answer(self.function, arguments))
        os._exit(0)

    def _address_space(self) -> int:
        pages = int(os.pread(self.memory, 64, 0).split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE") + int(self.limits["memory_bytes"])

    def _call(self, arguments: bytes) -> list[Any]:
        """How the call ended, and what else the parent gets."""
        deadline = time.monotonic() + self.limits["wall_s"]
        own_end, answers = os.pipe()
        address_space, server = self._address_space(), os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (self.requests, self.replies, self.life, self.memory, own_end):
                os.close(descriptor)
            self._answer_in_copy(arguments, address_space, answers, server)
        os.close(answers)
        answer = self._read_until(own_end, deadline)
        os.close(own_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if isinstance(answer, str):
            return [answer]
        if answer and code in (0, -signal.SIGKILL):
            return ["answer", answer.decode("utf-8", errors="replace")]
        return ["cpu"] if code == -signal.SIGXCPU else ["ended", code]

    def _answer_in_copy(self, arguments: bytes, address_space: int, pipe: int, server: int) -> NoReturn:
        answer, cpu_s = b"", self.limits["cpu_s"]
        with contextlib.suppress(BaseException):  # nothing runs without limits
            die_with_parent(server)
            limit_cpu(cpu_s, cpu_s + 1)  # SIGXCPU, which can be ignored, then SIGKILL
            limit_call(address_space)
            answer = _answer(self.function, arguments) + END
        with contextlib.suppress(OSError):
            while answer:
                answer = answer[os.write(pipe, answer) :]
        os._exit(0)

    def _read_until(self, pipe: int, deadline: float) -> bytes | str:
        """An answer, or the limit that the call broke: "time" or "output". Ends with the parent."""
        data = bytearray()
        while True:
            ready, _, _ = select.select([pipe, self.requests], [], [], max(0.0, deadline - time.monotonic()))
            if self.requests in ready:  # nothing is requested during a call: the parent has closed the pipe
                os._exit(0)
            if not ready:
                return "time"
            chunk = os.read(pipe, 1 << 16)
            data += chunk
            if len(data) > self.limits["output_bytes"]:
                return "output"
            if not chunk or chunk.endswith(END):
                return bytes(data)


def _answer(function: Callable[..., Any], arguments: bytes) -> bytes:
    """What the call gives, as JSON: a value, or why there is none."""
    try:
        return json.dumps(["value", function(*json.loads(arguments))]).encode()
    except MemoryError:
        return b'["memory"]'
    except BaseException as error:  # noqa: BLE001  # SystemExit too: whatever it is, it is an answer
        try:
            text = str(error)[:2000]
        except BaseException:  # noqa: BLE001  # the code of a class that nobody trusts
            text = ""
        return json.dumps(["raised", type(error).__name__, text]).encode()


def _die_with(life: int) -> None:
    """Let the kernel kill this process when the parent's end of the pipe is gone, also during an import."""
    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        os._exit(1)


def _check_isolation() -> None:
    """Try what must not work. Raises OSError if it does."""
    with contextlib.suppress(PermissionError):
        socket.socket().close()
        raise OSError(0, "a socket could be opened in the sandbox")
    with contextlib.suppress(PermissionError):
        os.close(os.open(f"/tmp/skylite-sandbox-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600))
        raise OSError(0, "a file could be written in the sandbox")


def send(pipe: int, message: object) -> None:
    """Write one message."""
    send_bytes(pipe, json.dumps(message).encode())


def send_bytes(pipe: int, body: bytes) -> None:
    data = LENGTH.pack(len(body)) + body
    while data:
        data = data[os.write(pipe, data) :]


def receive(pipe: int, deadline: float | None = None, most: int | None = None) -> bytes | None:
    """The JSON of the next message; None when the sender has closed the pipe.

    Raises TimeoutError at the deadline, OverflowError for a message of more than `most` bytes.
    """
    header = _read_exactly(pipe, LENGTH.size, deadline)
    if header is None:
        return None
    (length,) = LENGTH.unpack(header)
    if most is not None and length > most:
        raise OverflowError
    return _read_exactly(pipe, length, deadline)


def _read_exactly(pipe: int, count: int, deadline: float | None) -> bytes | None:
    data, waiting = bytearray(), select.poll()  # select() fails for descriptors from 1024 on
    waiting.register(pipe, select.POLLIN)
    while len(data) < count:
        left_ms = None if deadline is None else max(0.0, deadline - time.monotonic()) * 1000
        if not waiting.poll(left_ms):
            raise TimeoutError("the sandbox does not answer")
        chunk = os.read(pipe, count - len(data))
        if not chunk:
            return None
        data += chunk
    return bytes(data)


def make_nothing() -> Callable[[], None]:
    """The factory of a function that does nothing, to try whether this machine has a sandbox."""
    return lambda: None
