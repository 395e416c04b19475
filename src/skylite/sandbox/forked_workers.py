"""Confined copies (forks) of the sandbox's server, in which the calls run.

A copy serves one call, or the calls of `copy_life_s` seconds. The limits of one call hold for all calls of a
copy together. A copy ends with the first call that has no value, and when it has grown or writes something
that nobody asked for. What a copy answers is not trusted.
"""

from __future__ import annotations

import contextlib
import json
import os
import resource
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from skylite.sandbox.confine import Protection, limit_call
from skylite.sandbox.messages import receive, with_length
from skylite.sandbox.scratch import is_larger

SIZE_S = 0.1
"""How often the size of the scratch folder is checked."""
_VALUE = b'["value", '
END = b"\n"
"""Ends an answer. JSON in one line contains none."""
GROWTH_BYTES = 64 << 20
"""A copy that has taken more memory than this serves no further call."""


@dataclass(slots=True)
class _Copy:
    """One copy, as the server sees it."""

    pid: int
    requests: int
    """A pipe to the copy."""
    answers: int
    """A pipe from the copy."""
    ends_at: float
    """By time.monotonic(). No call starts later."""
    used: bool = False

    def can_serve(self) -> bool:
        """Whether its time is not over, it lives, and it has written nothing unasked."""
        return time.monotonic() < self.ends_at and not select.select([self.answers], [], [], 0)[0]

    def end(self) -> int:
        """End the process. Returns its exit code."""
        os.close(self.requests)
        os.close(self.answers)
        with contextlib.suppress(ProcessLookupError):
            os.kill(self.pid, signal.SIGKILL)
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


@dataclass(slots=True)
class Copies:
    """Runs calls of a function in copies of this process, one copy at a time."""

    function: Callable[..., Any]
    memory: int
    """/proc/self/statm, open."""
    requests: int
    """The parent's pipe. When it closes, this process ends."""
    private: tuple[int, ...]
    """More descriptors that a copy must not have."""
    scratch: Path | None
    protection: Protection
    resets: int | None
    """A pipe to the process that counts threads (count_threads.py)."""
    _copy: _Copy | None = None

    def wait(self) -> None:
        """Wait for a request of the parent. A copy whose time is over ends while it waits."""
        if self._copy is not None:
            left = max(0.0, self._copy.ends_at - time.monotonic())
            if not select.select([self.requests], [], [], left)[0]:
                self._end()

    def call(self, limits: dict[str, Any], arguments: bytes) -> list[Any]:
        """How the call ended, whether its copy had served before, and what else the parent gets.

        With limits["fresh"] no copy serves that has served before.
        """
        if self._copy is not None and (limits["fresh"] or not self._copy.can_serve()):
            self._end()
        if self._copy is None:
            self._copy = self._start(limits)
        copy, used = self._copy, self._copy.used
        copy.used = True
        deadline = time.monotonic() + limits["wall_s"]
        found: bytes | str = "time"
        if _write_until(copy.requests, with_length(arguments), deadline, self.requests):
            found = _read_until(copy.answers, deadline, limits, self.requests, self.scratch)
        if limits["copy_life_s"] > 0 and isinstance(found, bytes) and _is_value(found):
            return ["answer", used, _text(found)]
        code = self._end()
        if isinstance(found, str):
            return [found, used]
        if found and code in (0, -signal.SIGKILL):
            return ["answer", used, _text(found)]
        return ["cpu", used] if code == -signal.SIGXCPU else ["ended", used, code]

    def _start(self, limits: dict[str, Any]) -> _Copy:
        (requests, own_requests), (own_answers, answers) = os.pipe(), os.pipe()
        pages, server = int(os.pread(self.memory, 64, 0).split()[0]), os.getpid()
        own = [] if self.resets is None else [self.resets]
        for counter in own:
            os.write(counter, b"0")
        pid = os.fork()
        if pid == 0:
            for descriptor in (self.requests, self.memory, *self.private, *own, own_requests, own_answers):
                os.close(descriptor)
            memory_bytes = pages * os.sysconf("SC_PAGE_SIZE") + limits["memory_bytes"]
            limits = limits | {"memory_bytes": memory_bytes}
            _serve(self.function, limits, self.protection, requests, answers, server)
        os.close(requests)
        os.close(answers)
        os.set_blocking(own_requests, False)
        return _Copy(pid, own_requests, own_answers, time.monotonic() + limits["copy_life_s"])

    def _end(self) -> int:
        copy, self._copy = self._copy, None
        assert copy is not None, "checked by the callers"
        return copy.end()


def _serve(
    function: Callable[..., Any],
    limits: dict[str, Any],
    protection: Protection,
    requests: int,
    answers: int,
    server: int,
) -> NoReturn:
    """The copy: limit this process, answer calls until the server ends it."""
    try:
        limit_call(server, limits["memory_bytes"], limits["cpu_s"], limits["file_bytes"], protection)
    except BaseException as error:  # noqa: BLE001  # nothing runs without limits
        _write(answers, _raised(error))
        os._exit(0)
    start = _peak_bytes()
    while _peak_bytes() - start < GROWTH_BYTES and (body := receive(requests)) is not None:
        try:
            answer = json.dumps(["value", function(*json.loads(body))])
        except MemoryError:
            answer = '["memory"]'
        except BaseException as error:  # noqa: BLE001  # SystemExit too: whatever it is, it is an answer
            answer = _raised(error)
        _write(answers, answer)
    os._exit(0)


def _peak_bytes() -> int:
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _raised(error: BaseException) -> str:
    try:
        text = str(error)[:2000]
    except BaseException:  # noqa: BLE001  # the code of a class that nobody trusts
        text = ""
    return json.dumps(["raised", type(error).__name__, text])


def _write(pipe: int, answer: str) -> None:
    data = answer.encode() + END
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]


def _write_until(pipe: int, data: bytes, deadline: float, parent: int) -> bool:
    """Write to a copy, which may not read. Returns whether there was time. Ends with the parent."""
    while data:
        ready, writable, _ = select.select([parent], [pipe], [], max(0.0, deadline - time.monotonic()))
        if parent in ready:  # nothing is requested during a call, so the parent has closed the pipe
            os._exit(0)
        if not writable:
            return False
        try:
            data = data[os.write(pipe, data) :]
        except BrokenPipeError:  # the copy has ended, as its answer will tell
            return True
    return True


def _read_until(
    pipe: int, deadline: float, limits: dict[str, Any], parent: int, scratch: Path | None
) -> bytes | str:
    """An answer, or the limit that the call broke: "time", "output" or "files". Ends with the parent."""
    data = bytearray()
    while True:
        left = max(0.0, deadline - time.monotonic())
        ready, _, _ = select.select([pipe, parent], [], [], left if scratch is None else min(left, SIZE_S))
        if parent in ready:
            os._exit(0)
        if scratch is not None and is_larger(scratch, limits["file_bytes"]):
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


def _is_value(answer: bytes) -> bool:
    return answer.startswith(_VALUE) and answer.endswith(END)


def _text(answer: bytes) -> str:
    return answer.decode("utf-8", errors="replace")
