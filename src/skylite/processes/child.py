"""Child processes that cannot outlive this one, and the supervisor that stops them all when one ends.

Each child runs under a reaper (reaper.py), in its own session and with its own log.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import NoReturn, Self

import psutil

from skylite.errors import ChildDied, RunFailed
from skylite.processes.child_env import child_env
from skylite.processes.own_network import REAPER, why_shared
from skylite.processes.private_folders import TemporaryFolder
from skylite.processes.reaper import MARK, OWN_NETWORK, remove_leftovers
from skylite.processes.streams import private_file
from skylite.untrusted_files import open_file, open_to_append
from skylite.untrusted_text import plain

LONGEST_TMPDIR = 50
"""A socket's path has 107 bytes at most, and an engine adds 37 to the temporary folder."""
TAIL_BYTES = 128 * 1024
POLL_S = 0.05
STOP_TIMEOUT_S = 5.0
KILL_S = 2.0
"""Time for a reaper to kill its process tree before it is killed itself."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
_TORCHRUN_CHATTER = re.compile(r"^[WEI]\d{4} .*torch/distributed/(elastic|run)")
_TORCHRUN_SUMMARY = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode")
_TRACEBACK = "Traceback (most recent call last)"
_SYMPTOM = re.compile(
    r"(?<![\w.])[\w.]*(Error|Exception): .*"
    r"(See root cause above|See stack trace (\(above\) )?for (the )?root cause)"
)
"""Last line of a traceback that only points to an earlier one. An engine prints up to three of them."""

_LEAKS = re.compile(r"^nanobind: |^ - (leaked |\.\.\. skipped remainder)|^See https://nanobind\.")
"""What Triton's bindings print at every exit, after the error."""
_CAUSE = re.compile(r"^(\(\w+ pid=\d+\) )?(?P<text>[A-Za-z_][\w.]*(Error|Exception|Interrupt)(: .*)?)$")
"""Last line of a traceback."""
LONGEST_CAUSE = 300


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """The process to start."""

    name: str
    """Name in error messages, e.g. "engine-0"."""
    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables added to the parent's environment. Imports do not see the working folder (import_path.py)."""
    log_path: Path
    """stdout and stderr are appended to it."""
    own_network: bool = False
    """Start it in a network of its own, if the machine allows it: only its descendants reach its ports, and
    it reaches nothing but them. Unix sockets stay."""
    is_done: Callable[[], bool] = lambda: False
    """Whether exit code 0 is expected by now (a trainer after its last step). Any other exit is an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A started process. `process` is its reaper, which exits with the same code or signal as the command."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    reaper_pipe: FileIO
    """Write end of the reaper's pipe: closing it, or the death of this process, kills the process tree."""
    mark: str
    log_start: int
    """Size of the log when this child started; earlier bytes belong to an earlier child."""
    folder: TemporaryFolder
    """For temporary files and sockets, removed after its end."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Process id of the reaper, also its process group id."""
        return self.process.pid


def start(spec: ProcessSpec) -> Child:
    """Start a process under its reaper with empty stdin. Raises RunFailed when it cannot be started."""
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    reaper_pipe = private_file(write_end, "wb")
    mark, folder = uuid.uuid4().hex, _temporary_folder()
    # -I -S keeps user code and site packages out of the reaper; the command has its own interpreter flags.
    argv = [sys.executable, "-I", "-S", str(REAPER), str(read_end), *spec.argv]
    network = {OWN_NETWORK: "1" if spec.own_network and not why_shared() else ""}
    try:
        with FileIO(open_to_append(spec.log_path), "ab") as log:
            log_start = log.seek(0, os.SEEK_END)
            process = subprocess.Popen(
                argv,
                # Libraries obey files of the working folder, such as ./wandb/settings, .env and matplotlibrc.
                cwd=folder.path,
                env={**child_env(spec.env, str(folder.path)), **network, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[read_end],
                start_new_session=True,
            )
    except OSError as error:
        reaper_pipe.close()
        folder.remove()
        raise RunFailed(
            f"{spec.name} could not be started: {error}.",
            f"Check that {spec.log_path.parent} is writable.",
        ) from None
    finally:
        os.close(read_end)
    return Child(spec, process, reaper_pipe, mark, log_start, folder)


def _temporary_folder() -> TemporaryFolder:
    parent = tempfile.gettempdir()
    return TemporaryFolder(parent=Path(parent if len(parent) <= LONGEST_TMPDIR else "/tmp"))


def poll(child: Child) -> int | None:
    """Exit code of the child (negative: the signal), None while it runs.

    Kills leftover descendants before it returns the exit code.
    """
    if child.process.returncode is None and _reaper_has_ended(child):
        child.reaper_pipe.close()
        _kill_survivors(child)
        child.process.wait()
        child.folder.remove()
        remove_leftovers(None, child.mark)
    return child.process.returncode


def terminate(child: Child) -> None:
    """Send SIGTERM, which the reaper forwards to the command."""
    if poll(child) is None:
        child.process.terminate()


def kill(child: Child) -> None:
    """Kill the process tree and wait until it is gone."""
    child.reaper_pipe.close()
    deadline = time.monotonic() + KILL_S
    while poll(child) is None:
        if time.monotonic() > deadline:
            # The reaper does not react (it may be stopped), so kill it; poll() then kills its leftovers.
            child.process.kill()
        time.sleep(0.01)


def stopped_processes(child: Child) -> list[int]:
    """Ids of the child's processes that are stopped by SIGSTOP or SIGTSTP."""
    stopped = []
    for process in _processes(child.mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            if process.status() == psutil.STATUS_STOPPED:
                stopped.append(process.pid)
    return stopped


def describe_exit(child: Child) -> str:
    """How the child ended: "ended with exit code 1", "was killed by SIGKILL", or "is running"."""
    code = poll(child)
    return "is running" if code is None else describe_exit_code(code)


def describe_exit_code(code: int) -> str:
    """ "ended with exit code 1", or "was killed by SIGKILL" for a negative code."""
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def child_died(child: Child, lines: int = 15) -> ChildDied:
    """The error for an exited child: exit code or signal, cause, path of its log, and the last lines."""
    hint = f"Its log is {child.spec.log_path}."
    if poll(child) == -signal.SIGKILL:
        hint = f"The kernel sends SIGKILL when memory runs out. {hint}"
    tail = log_tail(child.spec.log_path, lines, child.log_start)
    cause = root_cause(tail)
    what = f"{child.name} {describe_exit(child)}{f': {cause}' if cause else ''}."
    return ChildDied(what, hint, tail, child.name)


def root_cause(tail: str) -> str:
    """The error that the last traceback of a `log_tail` ends with, on one line; empty without one."""
    lines = tail.split("\n")
    for number, line in reversed(list(enumerate(lines))):
        if (found := _CAUSE.match(line)) is not None:
            # pydantic writes the reason below its error, indented.
            below = lines[number + 1].strip() if lines[number + 1 : number + 2] else ""
            reason = below.partition(" [type=")[0] if "validation error" in line else ""
            return f"{found['text']}{': ' if reason else ''}{reason}"[:LONGEST_CAUSE].rstrip(". ")
    return ""


def log_tail(path: Path, lines: int, start: int = 0) -> str:
    """The last lines of a log, from byte `start`, as plain text.

    Removes colours and keeps only the last state of a progress bar. Omits what would hide the error:
    torchrun's summary, about forty lines after the failed rank's traceback, tracebacks that only point to an
    earlier one, and the leaks that Triton reports at an exit.
    """
    kept: list[str] = []
    for raw in raw_log_tail(path, start).split("\n"):
        line = plain(_ESCAPE.sub("", raw.rstrip("\r").rpartition("\r")[2])).rstrip()
        if _TORCHRUN_SUMMARY.search(line):
            break
        line = line if len(line) <= 500 else line[:500] + " ..."
        if line and not _TORCHRUN_CHATTER.match(line) and not _LEAKS.match(line):
            kept.append(line)
        if (symptom := _SYMPTOM.search(line)) is not None:
            _drop_traceback(kept, line[: symptom.start()])
    return "\n".join(kept[-lines:])


def _drop_traceback(lines: list[str], prefix: str) -> None:
    """Drop the last traceback whose lines begin with `prefix`, such as "(EngineCore pid=7) "."""
    numbers = reversed(range(len(lines)))
    start = next((i for i in numbers if lines[i].startswith(prefix + _TRACEBACK)), len(lines))
    lines[start:] = [line for line in lines[start:] if not line.startswith(prefix)]


def raw_log_tail(path: Path, start: int = 0) -> str:
    """The last TAIL_BYTES of a log, from byte `start`, unchanged; "" when the log does not exist."""
    try:
        with open_file(path) as stream:
            size = path.stat().st_size
            first = start if start <= size else 0  # a shorter log is a new one
            stream.seek(max(first, size - TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reaper_has_ended(child: Child) -> bool:
    """Check without collecting the exit status (WNOWAIT).

    The reaper stays a zombie, so the kernel cannot reuse its process group id while `poll` kills the group.
    """
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_survivors(child: Child) -> None:
    """Send SIGKILL to the process group and to every process with the child's mark."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for process in _processes(child.mark):
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()


def _processes(mark: str) -> list[psutil.Process]:
    """The processes whose environment contains the mark, as far as this user may read it."""
    return [p for p in psutil.process_iter(["environ"]) if (p.info["environ"] or {}).get(MARK) == mark]


class Supervisor:
    """`async with Supervisor() as supervisor:` leaves no process behind, however the block ends."""

    def __init__(
        self, stop_timeout_s: float = STOP_TIMEOUT_S, skip_wait: Callable[[], bool] = lambda: False
    ) -> None:
        """
        Args:
            stop_timeout_s: time for children to exit after SIGTERM at the end of the block, before SIGKILL.
            skip_wait: polled during that time; True kills the children at once.
        """
        self._stop_timeout_s = stop_timeout_s
        self._skip_wait = skip_wait
        self._children: dict[str, Child] = {}
        self._may_exit: set[str] = set()
        self._left_to_caller: set[str] = set()
        self._failure: BaseException | None = None

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        try:
            for child in self._children.values():
                terminate(child)
            deadline = time.monotonic() + self._stop_timeout_s
            while (
                time.monotonic() < deadline
                and not self._skip_wait()
                and any(poll(c) is None for c in self._children.values())
            ):
                await asyncio.sleep(POLL_S)  # lets the event loop handle a second Ctrl-C
        finally:
            self.stop(timeout_s=0)

    def start(self, spec: ProcessSpec) -> Child:
        """Start a child. stop_child() frees its name for reuse. Raises RunFailed."""
        if spec.name in self._children:
            raise ValueError(f"a child named {spec.name} already exists")
        child = start(spec)
        self._children[spec.name] = child
        return child

    def leave_to_caller(self, name: str) -> None:
        """From now on the caller handles the exit of this child; `check` ignores it."""
        self._left_to_caller.add(name)

    def fail(self, error: BaseException) -> None:
        """Make `check` and `watch` raise `error`: the caller that handles a child gives up."""
        self._failure = self._failure or error

    def check(self) -> None:
        """Raise the error given to `fail`, or ChildDied for an exited child.

        Exit code 0 is an error too, unless the child's spec says it is done or `wait_exit` waits for it.
        """
        if self._failure is not None:
            raise self._failure
        watched = [c for c in self._children.values() if c.name not in self._left_to_caller]
        ended = [c for c in watched if poll(c) is not None and not self._has_finished(c)]
        # One failure can take other children down: report a failed child before one that exited with 0.
        for child in sorted(ended, key=lambda c: poll(c) == 0):
            raise child_died(child)

    def pids(self) -> dict[str, int]:
        """Name -> process group id of the running children."""
        return {name: child.pid for name, child in self._children.items() if poll(child) is None}

    def stopped_pids(self, name: str) -> list[int]:
        """Ids of a child's processes that are stopped by a signal."""
        return stopped_processes(self._children[name]) if name in self._children else []

    def recent_log(self, name: str) -> str:
        """The last part of a child's log since its start; "" for an unknown child."""
        child = self._children.get(name)
        return "" if child is None else raw_log_tail(child.spec.log_path, child.log_start)

    async def watch(self) -> NoReturn:
        """Call `check` every POLL_S seconds until it raises."""
        while True:
            self.check()
            await asyncio.sleep(POLL_S)

    async def wait_exit(self, name: str) -> None:
        """Wait until this child exits. Raises ChildDied unless its exit code is 0."""
        child = self._children[name]
        self._may_exit.add(name)
        while poll(child) is None:
            await asyncio.sleep(POLL_S)
        if poll(child) != 0:
            raise child_died(child)

    def stop_child(self, name: str, timeout_s: float = STOP_TIMEOUT_S) -> None:
        """Stop one child and its process tree: SIGTERM, then SIGKILL after `timeout_s` seconds."""
        _stop_children([self._children[name]], timeout_s)
        self._forget(name)

    def stop(self, timeout_s: float) -> None:
        """Stop all children and their process trees: SIGTERM, then SIGKILL after `timeout_s` seconds."""
        _stop_children(list(self._children.values()), timeout_s)
        for name in list(self._children):
            self._forget(name)

    def _has_finished(self, child: Child) -> bool:
        return poll(child) == 0 and (child.name in self._may_exit or child.spec.is_done())

    def _forget(self, name: str) -> None:
        del self._children[name]
        self._may_exit.discard(name)
        self._left_to_caller.discard(name)


def _stop_children(children: list[Child], timeout_s: float) -> None:
    try:
        for child in children:
            terminate(child)
        deadline = time.monotonic() + timeout_s
        while time.monotonic() < deadline and any(poll(c) is None for c in children):
            time.sleep(0.02)
    finally:
        for child in children:
            kill(child)
