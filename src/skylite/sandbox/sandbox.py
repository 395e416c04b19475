"""Run a function on input that nobody trusts, such as model output that is evaluated as code.

    with Sandbox("my_module:make_scorer", "task") as sandbox:   # make_scorer("task") returns a function
        value = sandbox.call(entry, completion)                 # arguments and value are JSON

Each call runs in a process that

- has no network: it can open no socket of any kind;
- writes no file;
- reads Python, the system's libraries and `readable` only (where the kernel has Landlock);
- starts no process and no thread, sends no signal, and sees no memory of another process;
- is limited in memory, CPU time and time (`Limits`);
- has the environment variables of `_environment` only, so no tokens and passwords.

The process is fresh for each call, unless one serves all (`lasting`).
seccomp, Landlock and resource limits enforce this, for root, too. Where the kernel cannot, ConfigError is
raised before anything runs: there is no mode without protection. server.py is the other side.

The sandbox protects the machine, not the value: code that runs next to a scorer can answer in its place.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from io import FileIO
from pathlib import Path
from typing import Any, Self

from skylite.errors import ChildDied, ConfigError
from skylite.processes.child import describe_exit_code
from skylite.processes.import_path import NEUTRAL_FOLDER
from skylite.processes.streams import private_file
from skylite.sandbox.server import receive, send
from skylite.untrusted_text import encodable_json

SETUP_S = 300.0
"""Limit for imports and the factory."""
GRACE_S = 60.0
"""After its limit a call is ended by the server; this much later, the server is."""
END_S = 2.0
_START = (
    "import sys; sys.path[:] = sys.argv[2:]; from skylite.sandbox.server import main; main(int(sys.argv[1]))"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Limits:
    """What one call may use."""

    memory_bytes: int = 1 << 30
    """Beyond what the loaded modules take."""
    cpu_s: int = 10
    wall_s: float = 20.0
    output_bytes: int = 1 << 20
    """Size of the value as JSON."""


class CallFailed(Exception):
    """A call had no value. The text is a predicate, such as "took longer than 20 s"."""

    def __init__(self, text: str, raised: str = "") -> None:
        super().__init__(text)
        self.raised = raised
        """Name of the exception class, if the function raised one. Any text: code in the sandbox chose it."""


@functools.cache
def require_sandbox(what: str) -> None:
    """Raise ConfigError if this machine cannot run `what` in a sandbox."""
    with Sandbox("skylite.sandbox.server:make_nothing", what=what) as sandbox:
        sandbox.call()


class Sandbox:
    """One function in a sandbox. Threads take turns. The process starts with the first call or `start`."""

    def __init__(
        self,
        factory: str,
        *arguments: Any,
        what: str = "",
        limits: Limits | None = None,
        readable: Sequence[Path] = (),
        lasting: bool = False,
    ) -> None:
        """
        Args:
            factory: "module:name" of a function of an installed package. It runs once, in the sandbox but
                without the limits, and returns the function to call.
            arguments: of the factory; JSON.
            what: the function in error messages, such as "the reward reasoning-gym".
            limits: for each call.
            readable: files and folders that the function may read besides Python's own.
            lasting: one process serves all calls until one breaks a limit. Saves 10 ms a call. Only if calls
                need no protection from each other: code that takes over the process sees and answers later
                calls. Memory is limited for all calls together.
        """
        self._lasting = lasting
        self._exit_code = 0
        self._factory = factory
        self._arguments = arguments
        self._what = what or factory
        self._limits = limits or Limits()
        self._readable = [str(path.resolve()) for path in readable]
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._life: FileIO | None = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Start the process, if it does not run. Raises ConfigError without protection, CallFailed if the
        factory raises."""
        with self._lock:
            self._start()

    def call(self, *arguments: Any) -> Any:
        """The function's value. Raises CallFailed, ChildDied if the server behind it was killed, and
        ConfigError if this machine has no sandbox."""
        with self._lock:
            self._start()
            if self._lasting:
                return self._call_lasting(arguments)
            kind, *details = self._exchange(arguments, self._limits.wall_s + GRACE_S)
            return _result(kind, details, self._limits)

    def _call_lasting(self, arguments: Sequence[Any]) -> Any:
        limits, details = self._limits, list[Any]()
        try:
            body = self._send_and_receive(arguments, limits.wall_s, limits.output_bytes)
            kind, details = "answer", [body.decode("utf-8", errors="replace")]
        except TimeoutError:
            kind = "time"
        except OverflowError:
            kind = "output"
        except (OSError, EOFError) as error:
            if self._exit_code == -signal.SIGKILL:  # not by its limits
                raise self._died(error, limits.wall_s) from None
            kind, details = "cpu" if self._exit_code == -signal.SIGXCPU else "ended", [self._exit_code]
        return _result(kind, details, limits)

    def close(self) -> None:
        """End the process, also during a call of another thread, which then raises CallFailed."""
        process = self._process
        if process is not None:
            process.kill()
        with self._lock:
            self._end()

    def _start(self) -> None:
        if self._process is not None and self._process.poll() is None:
            return
        self._end()
        life, own_end = os.pipe()
        self._life = private_file(own_end, "wb")
        # -P -s -S: only `paths` add code, the user's folder and the working folder do not.
        paths = [path for path in sys.path if os.path.isabs(path)]
        try:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-s", "-S", "-c", _START, str(life), *paths],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                pass_fds=[life],
                env=_environment(),
                cwd=NEUTRAL_FOLDER,
                start_new_session=True,
            )
        finally:
            os.close(life)
        setup = {
            "factory": self._factory,
            "arguments": self._arguments,
            "readable": self._readable,
            "limits": asdict(self._limits),
            "lasting": self._lasting,
        }
        kind, *details = self._exchange(setup, SETUP_S)
        if kind == "isolated":
            self._end()
            raise ConfigError(
                f"This machine cannot run {self._what} in a sandbox: {details[0]}.",
                "It needs Linux on x86-64 or AArch64 with seccomp; containers allow that by default.",
            )
        if kind == "raised":
            self._end()
            raise CallFailed(f"raised {details[0]}: {details[1]}", details[0])

    def _exchange(self, message: Any, timeout_s: float) -> list[Any]:
        """Send a message to the server, which is trusted, and receive one. Raises ChildDied."""
        try:
            reply: list[Any] = json.loads(self._send_and_receive(message, timeout_s))
        except (OSError, EOFError) as error:  # nothing that is called can do that
            raise self._died(error, timeout_s) from None
        return reply

    def _send_and_receive(self, message: Any, timeout_s: float, most: int | None = None) -> bytes:
        """Any interruption ends the process. Raises as `receive`, OSError, and EOFError at its end."""
        process = self._process
        assert process is not None, "started by the caller"
        assert process.stdin is not None
        assert process.stdout is not None
        try:
            send(process.stdin.fileno(), message)
            body = receive(process.stdout.fileno(), time.monotonic() + timeout_s, most)
            if body is None:
                raise EOFError
        except BaseException as error:
            is_ending = isinstance(error, BrokenPipeError | EOFError)
            self._exit_code = self._end(wait=is_ending)
            raise
        return body

    def _died(self, error: Exception, timeout_s: float) -> ChildDied:
        if isinstance(error, TimeoutError):
            return ChildDied(
                f"The sandbox of {self._what} did not answer within {timeout_s:g} s.",
                "It was stopped, or the machine is overloaded.",
            )
        return ChildDied(
            f"The sandbox of {self._what} {describe_exit_code(self._exit_code)}.",
            "The kernel sends SIGKILL when memory runs out.",
        )

    def _end(self, *, wait: bool = False) -> int:
        """End the process; its exit code. `wait`: it has closed its pipe, and may be ending by itself.

        The caller holds the lock.
        """
        process, self._process, code = self._process, None, 0
        if process is not None:
            if wait:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(END_S)
            process.kill()
            code = process.wait()
            for pipe in (process.stdin, process.stdout):
                assert pipe is not None
                pipe.close()
        if self._life is not None:
            self._life.close()
        return code


def _environment() -> dict[str, str]:
    """Few variables, and one thread for libraries of linear algebra: calls are short, and forked."""
    kept = {n: os.environ[n] for n in ("PATH", "LD_LIBRARY_PATH", "LANG", "LC_ALL", "TZ") if n in os.environ}
    threads = dict.fromkeys(("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"), "1")
    folder = "/nonexistent"
    return {
        **kept,
        **threads,
        "HOME": folder,
        "TMPDIR": folder,
        "HF_HUB_OFFLINE": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "PYTHONDONTWRITEBYTECODE": "1",
        # Large pages: a copy of the process (fork) then copies and frees far fewer entries of page tables.
        "PYTHONMALLOC": "malloc",
        "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1",
    }


def _result(kind: str, details: list[Any], limits: Limits) -> Any:
    """The value in a reply. Raises CallFailed."""
    match kind:
        case "answer":
            return _value(details[0], limits)
        case "time":
            raise CallFailed(f"took longer than {limits.wall_s:g} s")
        case "cpu":
            raise CallFailed(f"used more than {limits.cpu_s} s of CPU time")
        case "output":
            raise CallFailed(f"returned more than {limits.output_bytes} bytes")
    raise CallFailed(describe_exit_code(details[0]))


def _value(answer: str, limits: Limits) -> Any:
    """The value in an answer that code in the sandbox may have written."""
    try:
        match encodable_json(json.loads(answer)):
            case ["value", value]:
                return value
            case ["memory"]:
                raise CallFailed(f"used more than {limits.memory_bytes} bytes of memory")
            case ["raised", str(name), str(text)]:
                raise CallFailed(f"raised {name}: {text}", name)
    except (ValueError, RecursionError):
        pass
    raise CallFailed("answered what is no value")
