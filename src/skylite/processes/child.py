"""Child processes that cannot outlive us. Each runs under a reaper (reaper.py) in a session of its own and writes to its own log."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path

from skylite.errors import ChildDied, RunFailed
from skylite.processes.descriptors import private_file

REAPER = Path(__file__).with_name("reaper.py")
MARK = "SKYLITE_CHILD"
"""Environment variable, unique a child and inherited by its descendants: finds them when the reaper itself was killed."""
TAIL_BYTES = 128 * 1024
KILL_S = 2.0
"""What a reaper gets to kill its tree before it is killed itself."""

_ESCAPE = re.compile(r"\x1b\[[0-9;?]*[A-Za-z]|\x1b\][^\x07]*\x07|[\x00-\x08\x0b-\x1f\x7f]")
_TORCHRUN_CHATTER = re.compile(r"^[WEI]\d{4} .*torch/distributed/(elastic|run)")
_TORCHRUN_SUMMARY = re.compile(r"torch/distributed/elastic/multiprocessing/api\.py:\d+\] failed \(exitcode")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProcessSpec:
    """What to start."""

    name: str
    """As errors call it, e.g. "vllm-0"."""
    argv: Sequence[str]
    env: Mapping[str, str]
    """Variables on top of the parent's own."""
    log_path: Path
    """Gets stdout and stderr, appended."""
    is_done: Callable[[], bool] = lambda: False
    """Whether an end with exit code 0 is in order by now (a trainer after its last step); every other end is an error."""


@dataclass(frozen=True, slots=True, eq=False)
class Child:
    """A started process. `process` is its reaper, which ends the way the command does."""

    spec: ProcessSpec
    process: subprocess.Popen[bytes]
    reaper_pipe: FileIO
    """Write end of the reaper's pipe: closing it kills the whole tree, and so does our own death."""
    mark: str
    log_start: int
    """Size of the log when this child started; what is before belongs to an earlier one."""

    @property
    def name(self) -> str:
        return self.spec.name

    @property
    def pid(self) -> int:
        """Of the reaper, which is also the process group."""
        return self.process.pid


def start(spec: ProcessSpec) -> Child:
    """Start a process under its reaper, stdin empty. Raises RunFailed when the program does not exist."""
    spec.log_path.parent.mkdir(parents=True, exist_ok=True)
    read_end, write_end = os.pipe()
    reaper_pipe = private_file(write_end, "wb")
    mark = uuid.uuid4().hex
    # -I -S: no user code and no site packages in the reaper; the command gets its own interpreter and flags.
    argv = [sys.executable, "-I", "-S", str(REAPER), str(read_end), *spec.argv]
    try:
        with spec.log_path.open("ab") as log:
            log_start = log.tell()
            process = subprocess.Popen(
                argv,
                env={**os.environ, **spec.env, MARK: mark},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=[read_end],
                start_new_session=True,
            )
    except OSError as error:
        reaper_pipe.close()
        raise RunFailed(
            f"{spec.name} could not be started: {error}.",
            f"Check that {spec.log_path.parent} can be written.",
        ) from None
    finally:
        os.close(read_end)
    return Child(spec, process, reaper_pipe, mark, log_start)


def poll(child: Child) -> int | None:
    """Exit code of an ended child (negative: the signal), None while it runs. On the end, what it left behind is killed first."""
    if child.process.returncode is None and _reaper_has_ended(child):
        child.reaper_pipe.close()
        _kill_leftovers(child)
        child.process.wait()
    return child.process.returncode


def terminate(child: Child) -> None:
    """Ask the command to end: SIGTERM, which the reaper passes on."""
    if poll(child) is None:
        child.process.terminate()


def kill(child: Child) -> None:
    """Kill the whole tree; returns when it is gone."""
    child.reaper_pipe.close()
    deadline = time.monotonic() + KILL_S
    while poll(child) is None:
        if time.monotonic() > deadline:
            # The reaper does not answer (it was stopped, say), so it goes too; poll() then sweeps up behind it.
            child.process.kill()
        time.sleep(0.01)


def stopped_processes(child: Child) -> list[int]:
    """Ids of the child's processes that SIGSTOP (or SIGTSTP) holds."""
    return [pid for pid in _pids_with_mark(child.mark) if _state(pid) == "T"]


def describe_exit(child: Child) -> str:
    """How an ended child ended, in words: "ended with exit code 1", "was killed by SIGKILL"."""
    code = poll(child)
    if code is None:
        return "is running"
    return f"was killed by {_signal_name(-code)}" if code < 0 else f"ended with exit code {code}"


def child_died(child: Child, lines: int = 15) -> ChildDied:
    """The error for a child that ended: how, where its log is, and the log's last lines."""
    hint = f"Its log is {child.spec.log_path}."
    if poll(child) == -signal.SIGKILL:
        hint = f"The kernel does that when memory runs out. {hint}"
    return ChildDied(
        f"{child.name} {describe_exit(child)}.", hint, log_tail(child.spec.log_path, lines, child.log_start)
    )


def log_tail(path: Path, lines: int, start: int = 0) -> str:
    """The last lines of a log from byte `start` on, as plain text: no colours, a progress bar as its last state.

    torchrun's own summary is left out: it prints some forty lines after a rank's traceback, and the traceback is what a person needs.
    """
    kept: list[str] = []
    for raw in raw_log_tail(path, start).split("\n"):
        line = _ESCAPE.sub("", raw.rstrip("\r").rpartition("\r")[2]).rstrip()
        if _TORCHRUN_SUMMARY.search(line):
            break
        if line and not _TORCHRUN_CHATTER.match(line):
            kept.append(line if len(line) <= 500 else line[:500] + " ...")
    return "\n".join(kept[-lines:])


def raw_log_tail(path: Path, start: int = 0) -> str:
    """The last TAIL_BYTES of a log from byte `start` on, as they are; "" where there is none."""
    try:
        with path.open("rb") as stream:
            stream.seek(max(start, path.stat().st_size - TAIL_BYTES))
            return stream.read().decode("utf-8", errors="replace")
    except FileNotFoundError:
        return ""


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"


def _reaper_has_ended(child: Child) -> bool:
    """WNOWAIT leaves the reaper a zombie, so that its process group number cannot go to a stranger while we kill the group."""
    return os.waitid(os.P_PID, child.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None


def _kill_leftovers(child: Child) -> None:
    """SIGKILL for the group and for every process that carries the child's mark; by id, never by name."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(child.pid, signal.SIGKILL)
    for pid in _pids_with_mark(child.mark):
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _state(pid: int) -> str:
    """The kernel's letter: R, S, D, T (stopped), Z; empty when the process is gone."""
    with contextlib.suppress(FileNotFoundError, ProcessLookupError):
        return Path("/proc", str(pid), "stat").read_text().rpartition(")")[2].split()[0]
    return ""


def _pids_with_mark(mark: str) -> list[int]:
    """Processes of ours whose environment holds the mark."""
    needle = f"{MARK}={mark}".encode()
    found = []
    for name in os.listdir("/proc"):
        if not name.isdigit():
            continue
        try:
            environment = Path("/proc", name, "environ").read_bytes()
        except (FileNotFoundError, ProcessLookupError, PermissionError):
            continue
        if needle in environment:
            found.append(int(name))
    return found
