"""Run one command and take it down, with everything it has started, when the parent goes away.

    python reaper.py DESCRIPTOR COMMAND [ARGUMENT ...]

DESCRIPTOR is the read end of a pipe whose write end only the parent holds: it ends when the parent does, `kill -9` included.
vLLM's engine processes do not watch their parent, so somebody has to. This file imports the standard library alone and is run as
a script: it starts in about 20 ms and takes 10 MB.

Four things hold, so that no order of deaths leaves a process behind:

- The reaper adopts every descendant that loses its own parent (PR_SET_CHILD_SUBREAPER), so a process that opened its own session is
  found too.
- The command leads a process group of its own and keeps the pipe's read end open, in which the kernel is told (O_ASYNC, F_SETSIG) to
  send SIGKILL to that whole group when the pipe ends. That needs nobody to be awake: a reaper that is stopped, or killed in the same
  instant as the parent, changes nothing.
- What a command starts in sessions of its own (torchrun's ranks) or what its main process may leave behind (vLLM's engine core) has
  its kernel's word on its own parent's death (PR_SET_PDEATHSIG), checked against COMMAND_PID.
- A reaper that is stopped when the parent dies is continued by the kernel (PR_SET_PDEATHSIG with SIGCONT), and then ends.

The command itself has no PR_SET_PDEATHSIG on the reaper: it would close the pipe before the pipe ends, and its group would live on.

SIGTERM and SIGINT are passed on to the command, which knows best how to end its children. When the command ends, what
it left behind gets GRACE_S to finish (multiprocessing's resource tracker frees shared memory then), and the reaper ends the way the
command did: same exit code, same signal.
"""

from __future__ import annotations

import ctypes
import fcntl
import os
import resource
import select
import signal
import sys
import time
from typing import NoReturn

F_SETSIG = 10
"""Linux; which signal O_ASYNC sends."""
COMMAND_PID = "SKYLITE_COMMAND_PID"
"""Environment variable of the command and its descendants: the command's process id and group."""
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 0.5


def main() -> NoReturn:
    parent_pipe, command = int(sys.argv[1]), sys.argv[2:]
    _prctl(PR_SET_CHILD_SUBREAPER, 1)
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    signals = _signal_pipe()
    pid = _start(command, parent_pipe)
    status = _watch(pid, parent_pipe, signals)
    if status is None:
        _kill_descendants()
        os._exit(1)
    _reap_for(GRACE_S)
    _kill_descendants()
    _exit_like(status)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _signal_pipe() -> int:
    """The read end of a pipe that gets one byte, its number, for each signal that arrives."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return read_end


def _start(command: list[str], parent_pipe: int) -> int:
    """Fork and execute."""
    # Blocked over the fork, so that a signal cannot reach the child while it still has the reaper's handlers.
    signal.pthread_sigmask(signal.SIG_BLOCK, FORWARDED_SIGNALS)
    pid = os.fork()
    if pid == 0:
        _execute(command, parent_pipe)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    return pid


def _execute(command: list[str], parent_pipe: int) -> NoReturn:
    _die_with_pipe(parent_pipe)
    os.environ[COMMAND_PID] = str(os.getpid())
    signal.set_wakeup_fd(-1)
    # Python ignores SIGPIPE and SIGXFSZ, and an ignored signal stays ignored over exec.
    for number in (*FORWARDED_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def _die_with_pipe(parent_pipe: int) -> None:
    """Lead a process group that the kernel kills when the pipe's last writer is gone."""
    os.setpgid(0, 0)
    fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(parent_pipe, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(parent_pipe, True)
    if select.select([parent_pipe], [], [], 0)[0]:  # it ended before the kernel was told
        os._exit(1)


def _watch(pid: int, parent_pipe: int, signals: int) -> int | None:
    """Wait status of the command, or None when the parent is gone."""
    while True:
        ready, _, _ = select.select([parent_pipe, signals], [], [])
        if parent_pipe in ready:
            return None
        for number in os.read(signals, 64):
            if number in FORWARDED_SIGNALS:
                os.kill(pid, number)
        status = _reap(pid)
        if status is not None:
            return status


def _reap(pid: int) -> int | None:
    """Collect every ended child, adopted ones too; the wait status of `pid` when it is among them."""
    status = None
    while (ended := _wait_any(os.WNOHANG)) is not None and ended[0] != 0:
        if ended[0] == pid:
            status = ended[1]
    return status


def _wait_any(options: int) -> tuple[int, int] | None:
    """`waitpid` for any child; None when there is none left."""
    try:
        return os.waitpid(-1, options)
    except ChildProcessError:
        return None


def _reap_for(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _wait_any(os.WNOHANG) is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def _kill_descendants() -> None:
    """SIGKILL and collect until nothing is left; orphans become our children, so every round reaches deeper."""
    while _wait_any(os.WNOHANG) is not None:
        for pid in _descendants(os.getpid()):
            try:
                os.kill(pid, signal.SIGKILL)
            except ProcessLookupError:
                continue
        time.sleep(0.005)


def _descendants(root: int) -> list[int]:
    children: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            children.setdefault(_parent_of(name), []).append(int(name))
    found = list(children.get(root, ()))
    for pid in found:
        found += children.get(pid, ())
    return found


def _parent_of(pid: str) -> int:
    """Parent pid, 0 when the process is gone; in /proc/PID/stat it follows the name, which may hold spaces and brackets."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return int(stream.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _exit_like(status: int) -> NoReturn:
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    main()
