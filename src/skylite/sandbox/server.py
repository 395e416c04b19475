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
import shutil
import signal
import socket
import stat
import struct
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, NoReturn

from skylite.processes.reaper import die_with_parent
from skylite.sandbox.confine import (
    SETUP_BYTES,
    Protection,
    isolate,
    landlock_version,
    limit_call,
    limit_cpu,
    lower_limit,
    mount_bounded,
)

LENGTH = struct.Struct(">Q")
SIZE_S = 0.1
"""How often the size of the scratch folder is checked."""
END = b"\n"
"""Ends an answer. JSON in one line contains none."""
_FILL = stat.S_IWUSR | stat.S_IXUSR
_ENTRY_BYTES = 4096
"""Counted for each file and folder, so that empty ones have a limit, too."""
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
    scratch = None if request["scratch"] is None else Path(request["scratch"])
    memory = os.open("/proc/self/statm", os.O_RDONLY)
    # Twice: the server counts files, too, and says that there are too many. This is the last resort.
    is_bounded = scratch is not None and mount_bounded(scratch, 2 * request["file_bytes"])
    os.chdir(scratch or "/")
    lower_limit(resource.RLIMIT_AS, SETUP_BYTES)
    protection = Protection(landlock_version(), is_bounded)
    try:
        isolate([Path(p) for p in request["readable"]], scratch)
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
    send(replies, ["ready", asdict(protection)])
    server = _Server(function, memory, requests, replies, life, scratch, protection)
    if request["lasting"]:
        server.answer_here(request["lasting"])
    server.serve()


@dataclass(frozen=True, slots=True)
class _Server:
    function: Callable[..., Any]
    memory: int
    """/proc/self/statm, open."""
    requests: int
    """The parent's pipe. When it closes, this process ends."""
    replies: int
    life: int
    scratch: Path | None
    protection: Protection

    def serve(self) -> NoReturn:
        """Answer requests of two messages: the limits of a call, and its arguments."""
        while True:
            limits, arguments = receive(self.requests), receive(self.requests)
            if limits is None or arguments is None:
                os._exit(0)
            request = json.loads(limits)
            if self.scratch is not None and not _empty(self.scratch):
                send(self.replies, ["dirty"])
                continue
            send(self.replies, self._call(request, arguments))

    def answer_here(self, limits: dict[str, Any]) -> NoReturn:
        """Limit this process and answer requests of one message, the arguments, until it breaks a limit."""
        limit_call(self._address_space(limits), limits["file_bytes"], self.protection)
        os.close(self.memory)
        while (arguments := receive(self.requests)) is not None:
            used = resource.getrusage(resource.RUSAGE_SELF)
            limit_cpu(int(used.ru_utime + used.ru_stime) + 1 + limits["cpu_s"])
            send_bytes(self.replies, _answer(self.function, arguments))
        os._exit(0)

    def _address_space(self, limits: dict[str, Any]) -> int:
        pages = int(os.pread(self.memory, 64, 0).split()[0])
        return pages * os.sysconf("SC_PAGE_SIZE") + int(limits["memory_bytes"])

    def _call(self, limits: dict[str, Any], arguments: bytes) -> list[Any]:
        """How the call ended, and what else the parent gets."""
        deadline = time.monotonic() + limits["wall_s"]
        own_end, answers = os.pipe()
        address_space, server = self._address_space(limits), os.getpid()
        pid = os.fork()
        if pid == 0:
            for descriptor in (self.requests, self.replies, self.life, self.memory, own_end):
                os.close(descriptor)
            self._answer_in_copy(arguments, limits, address_space, answers, server)
        os.close(answers)
        answer = self._read_until(own_end, deadline, limits)
        os.close(own_end)
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
        code = os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])
        if isinstance(answer, str):
            return [answer]
        if answer and code in (0, -signal.SIGKILL):
            return ["answer", answer.decode("utf-8", errors="replace")]
        return ["cpu"] if code == -signal.SIGXCPU else ["ended", code]

    def _answer_in_copy(
        self, arguments: bytes, limits: dict[str, Any], address_space: int, pipe: int, server: int
    ) -> NoReturn:
        answer = b""
        with contextlib.suppress(BaseException):  # nothing runs without limits
            die_with_parent(server)
            limit_cpu(limits["cpu_s"], limits["cpu_s"] + 1)  # SIGXCPU, which can be ignored, then SIGKILL
            limit_call(address_space, limits["file_bytes"], self.protection)
            answer = _answer(self.function, arguments) + END
        with contextlib.suppress(OSError):
            while answer:
                answer = answer[os.write(pipe, answer) :]
        os._exit(0)

    def _read_until(self, pipe: int, deadline: float, limits: dict[str, Any]) -> bytes | str:
        """An answer, or the limit that the call broke: "time", "output" or "files". Ends with the parent."""
        data = bytearray()
        while True:
            left = max(0.0, deadline - time.monotonic())
            wait = left if self.scratch is None else min(left, SIZE_S)
            ready, _, _ = select.select([pipe, self.requests], [], [], wait)
            if self.requests in ready:  # nothing is requested during a call: the parent has closed the pipe
                os._exit(0)
            if self.scratch is not None and is_larger(self.scratch, limits["file_bytes"]):
                return "files"
            if not ready:
                if time.monotonic() >= deadline:
                    return "time"
                continue
            chunk = os.read(pipe, 1 << 16)
            data += chunk
            if len(data) > limits["output_bytes"]:
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


def is_larger(folder: Path, most: int) -> bool:
    """Whether the files below take more than `most` bytes, or could: a folder that can be filled, not listed.

    A folder that cannot be filled either stays empty: no mode can be changed in the sandbox. Deleted files
    that are still open are not seen.
    """
    size, left = 0, [str(folder)]
    try:
        while left:
            path = left.pop()
            try:
                with os.scandir(path) as entries:
                    for entry in entries:
                        size += _ENTRY_BYTES + 512 * entry.stat(follow_symlinks=False).st_blocks
                        if entry.is_dir(follow_symlinks=False):
                            left.append(entry.path)
            except PermissionError:
                if path == str(folder) or os.lstat(path).st_mode & _FILL == _FILL:
                    return True
            if size > most:
                return True
    except (FileNotFoundError, NotADirectoryError):
        # The code removes files meanwhile, which it can in a file system of limited size only.
        return False
    except OSError:
        return True
    return False


def _empty(folder: Path) -> bool:
    """Remove everything in the folder. Whether that worked."""
    try:
        for path in folder.iterdir():
            if stat.S_ISDIR(path.lstat().st_mode):
                shutil.rmtree(path)
            else:
                path.unlink()
    except (OSError, RecursionError):
        return False
    return True


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
