"""The process that runs episodes: it imports the user's file once, then forks a process for each episode.

    python -P -m skylite.environments.episode_host SOCKET SPEC SHA256

It talks with the parent in JSON lines over the Unix socket. From the parent: {"id", "task", "endpoint"} and
{"cancel": id}. To the parent: {"ready": true} or {"failed": text}, then {"id", "seconds", "value"}, {"id",
"seconds", "raised", "at_limit"} or {"id", "seconds", "ended"} for each episode. An episode's process is
killed at its end, with all its descendants: orphans among them become its children, and those of a process
that ended by itself become the host's.
"""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import json
import math
import os
import random
import resource
import selectors
import signal
import socket
import stat
import subprocess
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NoReturn

from skylite.environments.chat import BlockingChat, Chat, Task, is_limit
from skylite.environments.episode_spec import USERS_FOLDER, command_words
from skylite.environments.episodes import BUILT_IN
from skylite.errors import SkyliteError
from skylite.processes.reaper import adopt_orphans, children, die_with_parent, kill_tree
from skylite.untrusted_text import encodable_json, parse_json
from skylite.user_functions import (
    EPISODE,
    FEEDBACK,
    is_command,
    is_verifiers,
    load_function,
    split_feedback,
)

FILE_BYTES = 1 << 30
"""Largest file that an episode may write. What it prints has no limit (`Printed`)."""
RESULT_BYTES = 1 << 18
"""Largest result of an episode."""
IMPORTS_OF_A_REQUEST = ("anyio._backends._asyncio", "h11", "httpcore")
"""httpx imports these at its first request. Imported here, they do not cost each episode 40 ms of CPU."""
ORPHANS_S = 2.0
"""Longest wait for the end of orphans. Another user's, say of a setuid program, cannot be killed."""
Episode = Callable[..., Any]


LOG_BYTES = 256 << 20
"""Largest log. An older one of that size stays beside it."""
LINE_BYTES = 1 << 16
"""A longer line is written in parts, between which other episodes may print."""
CHUNK_BYTES = 1 << 16
CHUNKS = 16
"""Read at once at most: one episode that prints without end must not keep the host from the others."""


@dataclass(slots=True)
class Printed:
    """The read end of one episode's pipe.

    Each episode prints into a pipe of its own, so that neither a large log, nor a full disk, nor another
    episode can end it. The log keeps the newest output: at LOG_BYTES it becomes episodes.log.1, which
    replaces an older one.
    """

    pipe: int
    _line: bytes = b""

    def read(self) -> bool:
        """Write to the log what has been printed. Returns whether more may come."""
        with contextlib.suppress(BlockingIOError):
            for _ in range(CHUNKS):
                if not (chunk := os.read(self.pipe, CHUNK_BYTES)):
                    return False
                complete, end, rest = (self._line + chunk).rpartition(b"\n")
                if not end and len(rest) < LINE_BYTES:
                    self._line = rest
                    continue
                self._line = rest if end else b""
                append_to_log(complete + end if end else rest)
        return True

    def finish(self) -> None:
        """Write the rest to the log and close the pipe."""
        self.read()
        if self._line:
            append_to_log(self._line + b"\n")
        os.close(self.pipe)


def print_into_pipe() -> tuple[Printed, int]:
    """A pipe for an episode, and its write end."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    return Printed(read_end), write_end


def append_to_log(data: bytes) -> None:
    """Append to this process's stdout. What the disk does not take is lost: no print may end an episode."""
    with contextlib.suppress(OSError):
        info = os.fstat(1)
        if stat.S_ISREG(info.st_mode) and info.st_size + len(data) > LOG_BYTES:
            _start_new_log()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(1, data) :]


def _start_new_log() -> None:
    path = os.readlink("/proc/self/fd/1")
    os.replace(path, f"{path}.1")
    log = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    for descriptor in (1, 2):
        os.dup2(log, descriptor)
    os.close(log)


@dataclass(slots=True)
class Running:
    """An episode's process. `result` fills from its pipe."""

    id: int
    pid: int
    pidfd: int
    pipe: int
    printed: Printed
    started: float = field(default_factory=time.monotonic)
    result: bytearray = field(default_factory=bytearray)


def main() -> None:
    path, spec, sha256 = sys.argv[1:4]
    adopt_orphans()
    parent = socket.socket(socket.AF_UNIX)
    parent.connect(path)
    try:
        episode = load_episode(spec, sha256 or None)
    except SkyliteError as error:
        _send(parent, {"failed": error.what, "hint": error.hint})
        return
    for name in IMPORTS_OF_A_REQUEST:
        importlib.import_module(name)
    _send(parent, {"ready": True})
    Host(parent, episode).serve()


def load_episode(spec: str, sha256: str | None) -> Episode:
    """The episode function. Raises ConfigError."""
    if spec in BUILT_IN:
        module = importlib.import_module(f"skylite.environments.episodes.{spec.replace('-', '_')}")
        function: Episode = module.episode
        return function
    if is_command(spec):
        return command_episode(spec)
    if is_verifiers(spec):
        adapter = importlib.import_module("skylite.environments.verifiers_episode")
        adapted: Episode = adapter.verifiers_episode(spec)
        return adapted
    return load_function(spec, EPISODE, sha256)


class CommandFailed(Exception):
    """The program failed or printed no reward."""


class NonzeroExit(CommandFailed):
    """The program failed. Nobody can tell whether a limit was the reason."""


def command_episode(spec: str) -> Callable[[Task, BlockingChat], Any]:
    """The episode that runs this command line. Raises ConfigError.

    The program starts once for each trajectory, in the folder in which the user started skylite. It gets
    OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and the task as JSON in SKYLITE_TASK and on its standard
    input. The last line that it prints is the reward as JSON.
    """
    words = command_words(spec)

    def episode(task: Task, chat: BlockingChat) -> Any:
        text = json.dumps(dataclasses.asdict(task))
        folder = os.environ.get(USERS_FOLDER)
        env = {k: v for k, v in os.environ.items() if k != USERS_FOLDER} | {
            "OPENAI_BASE_URL": chat.base_url,
            "OPENAI_API_KEY": chat.api_key,
            "OPENAI_MODEL": chat.model,
            "SKYLITE_TASK": text,
        }
        # In this process group, which is killed at the end of the episode.
        done = subprocess.run(
            words,
            env=env,
            cwd=folder,
            input=text,
            stdout=subprocess.PIPE,
            encoding="utf-8",
            errors="replace",
            check=False,
        )
        sys.stdout.write(done.stdout)
        if done.returncode != 0:
            raise NonzeroExit(f"{words[0]} ended with {done.returncode}; its output is in the log")
        lines = done.stdout.strip().splitlines()
        try:
            return parse_json(lines[-1] if lines else "")
        except ValueError:
            last = lines[-1][:200] if lines else ""
            raise CommandFailed(
                f"the last line that {words[0]} printed is {last!r}; it must be the reward as JSON"
            ) from None

    return episode


class Host:
    """Runs episodes until the parent closes the socket."""

    def __init__(self, parent: socket.socket, episode: Episode) -> None:
        self._parent = parent
        self._episode = episode
        self._running: dict[int, Running] = {}
        self._selector = selectors.DefaultSelector()
        self._selector.register(parent, selectors.EVENT_READ)
        self._input = bytearray()
        self._kept = children(os.getpid())
        """What the episode's file started when it was imported."""

    def serve(self) -> None:
        while True:
            for key, _ in self._selector.select():
                if key.data is not None:
                    if key.data.id not in self._running:  # ended by an event before this one
                        continue
                    if key.fd == key.data.printed.pipe:
                        if not key.data.printed.read():
                            self._forget(key.fd)
                    else:
                        self._read_result(key.data, ended=key.fd == key.data.pidfd)
                elif not self._read_requests():
                    for running in list(self._running.values()):
                        kill_tree(running.pid)
                    return

    def _read_requests(self) -> bool:
        data = self._parent.recv(1 << 16)
        self._input += data
        *lines, rest = self._input.split(b"\n")
        self._input = bytearray(rest)
        for line in lines:
            message = json.loads(line)
            if "cancel" in message:
                if (running := self._running.get(message["cancel"])) is not None:
                    kill_tree(running.pid)
            else:
                self._start(message)
        return bool(data)

    def _start(self, message: dict[str, Any]) -> None:
        read_end, write_end = os.pipe()
        printed, printing = print_into_pipe()
        sys.stdout.flush()
        sys.stderr.flush()
        host, pid = os.getpid(), os.fork()
        if pid == 0:
            os.close(read_end)
            os.close(printed.pipe)
            for descriptor in (1, 2):
                os.dup2(printing, descriptor)
            os.close(printing)
            self._selector.close()
            self._parent.close()
            for other in self._running.values():
                os.close(other.pipe)
                os.close(other.pidfd)
                os.close(other.printed.pipe)
            _run_episode(self._episode, message, write_end, host)
        os.close(write_end)
        os.close(printing)
        with contextlib.suppress(OSError):  # the child does the same; whoever is first
            os.setpgid(pid, pid)
        os.set_blocking(read_end, False)
        running = Running(message["id"], pid, os.pidfd_open(pid), read_end, printed)
        self._running[running.id] = running
        self._selector.register(running.pipe, selectors.EVENT_READ, running)
        self._selector.register(printed.pipe, selectors.EVENT_READ, running)
        self._selector.register(running.pidfd, selectors.EVENT_READ, running)

    def _read_result(self, running: Running, *, ended: bool) -> None:
        """Read on. A complete line ends the episode, and so does the end of its process."""
        with contextlib.suppress(BlockingIOError):
            while chunk := os.read(running.pipe, 1 << 16):
                running.result += chunk
                if len(running.result) > RESULT_BYTES:
                    ended = True
                    break
            if not ended:
                self._forget(running.pipe)  # closed without a result: wait for the end of the process
        if not ended and not running.result.endswith(b"\n"):
            return
        seconds = time.monotonic() - running.started
        for descriptor in (running.pipe, running.pidfd):
            self._forget(descriptor)
            os.close(descriptor)
        del self._running[running.id]
        kill_tree(running.pid)
        _, status = os.waitpid(running.pid, 0)
        self._forget(running.printed.pipe)
        running.printed.finish()  # before the parent names the log in an error
        found = _result(bytes(running.result)) or {"ended": os.waitstatus_to_exitcode(status)}
        self._end_orphans()
        _send(self._parent, {**found, "id": running.id, "seconds": seconds})

    def _end_orphans(self) -> None:
        """Kill and collect what ended episodes left. Orphans of a running episode are its own children."""
        own = self._kept | {running.pid for running in self._running.values()}
        deadline = time.monotonic() + ORPHANS_S
        while (orphans := children(os.getpid()) - own) and time.monotonic() < deadline:
            for pid in orphans:
                kill_tree(pid)
                with contextlib.suppress(ChildProcessError):
                    os.waitpid(pid, os.WNOHANG)
            time.sleep(0.002)

    def _forget(self, descriptor: int) -> None:
        with contextlib.suppress(KeyError):
            self._selector.unregister(descriptor)


def _run_episode(episode: Episode, message: dict[str, Any], pipe: int, host: int) -> NoReturn:
    """The forked process: run the episode, write its result, and wait for the host to kill it."""
    with contextlib.suppress(OSError):
        os.setpgid(0, 0)
    die_with_parent(host)
    adopt_orphans()  # so that they are still found when the episode returns
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent decides
    most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
    limit = FILE_BYTES if most == resource.RLIM_INFINITY else min(FILE_BYTES, most)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, limit))
    task, endpoint = Task(**message["task"]), message["endpoint"]
    random.seed(task.seed)
    if (numpy := sys.modules.get("numpy")) is not None:
        numpy.random.seed(task.seed % 2**32)
    try:
        found: dict[str, Any] = {"value": plain_value(_call(episode, task, endpoint))}
    except BaseException as error:  # noqa: BLE001  # SystemExit too is an error of the episode
        traceback.print_exc()
        at_limit = is_limit(error) or isinstance(error, NonzeroExit)
        found = {"raised": f"{type(error).__name__}: {error}"[:2000], "at_limit": at_limit}
    if (tools := sys.modules.get("skylite.environments.python_tool")) is not None:
        with contextlib.suppress(OSError):  # a folder that cannot be removed is no error of the episode
            tools.close_sandboxes()
    data = json.dumps(found).encode() + b"\n"
    if len(data) > RESULT_BYTES:
        data = b'{"raised": "ValueError: the episode returned more than fits into 256 KiB"}\n'
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    with contextlib.suppress(OSError):
        while data:
            data = data[os.write(pipe, data) :]
        while True:  # the end of this process would hide from the host what it has started
            signal.pause()
    os._exit(0)


def _result(line: bytes) -> dict[str, Any] | None:
    """What the episode's process wrote; None if it is no result. Any code of the episode can write there."""
    try:
        found = json.loads(line) if line.endswith(b"\n") and len(line) <= RESULT_BYTES else None
    except (ValueError, RecursionError):
        return None
    is_result = isinstance(found, dict) and found.keys() <= {"value", "raised", "at_limit"}
    return found if is_result else None


def _call(episode: Episode, task: Task, endpoint: dict[str, str]) -> Any:
    if inspect.iscoroutinefunction(episode):
        return asyncio.run(episode(task, Chat(**endpoint)))
    return episode(task, BlockingChat(**endpoint))


def plain_value(value: Any) -> Any:
    """A reward as JSON: a number, a list of numbers, or a dict of them, which may have a feedback.

    Raises TypeError or ValueError.
    """
    if isinstance(value, dict):
        numbers, feedback = split_feedback(value)
        text = {FEEDBACK: feedback} if feedback else {}
        return {str(name): _number(x) for name, x in numbers.items()} | text
    if isinstance(value, list | tuple):
        return [_number(x) for x in value]
    return _number(value)


def _number(value: Any) -> float:
    with contextlib.suppress(TypeError, ValueError, OverflowError):
        if math.isfinite(number := float(value)):
            return number
    raise TypeError(
        f"the episode returned {value!r:.200}; a reward is a finite number, one number a turn in a list, or "
        "named numbers in a dict"
    )


def _send(parent: socket.socket, message: dict[str, Any]) -> None:
    parent.sendall(json.dumps(encodable_json(message)).encode() + b"\n")


if __name__ == "__main__":
    main()
