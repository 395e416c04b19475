"""No process outlives its parent: what the kernel offers, and a program that uses it for one command.

    python reaper.py DESCRIPTOR COMMAND [ARGUMENT ...]
    python reaper.py own-network            (can this machine give a command a network of its own?)

DESCRIPTOR is the read end of a pipe. Only the parent holds the write end, so the pipe closes when the parent
dies, even by `kill -9`. An engine's processes do not watch their parent, so the reaper does. It runs as a
script and imports only the standard library while the command runs, so that it starts fast and takes little
memory.

Four mechanisms ensure that no order of deaths leaves a process behind:

- The reaper adopts every descendant that loses its parent (PR_SET_CHILD_SUBREAPER), so it also finds
  processes that opened their own session.
- The command leads its own process group and keeps the read end of the pipe open. The kernel sends SIGKILL to
  that group when the pipe closes (O_ASYNC, F_SETSIG). This also works while the reaper is stopped, or when it
  dies together with the parent.
- Processes in other sessions (torchrun's ranks) and processes that may outlive the command (an engine's
  core) ask the kernel to kill them with their own parent (PR_SET_PDEATHSIG). They check their parent against
  COMMAND_PID.
- The kernel wakes a stopped reaper when the parent dies (PR_SET_PDEATHSIG with SIGCONT); the reaper then
  kills and exits.

The command does not use PR_SET_PDEATHSIG on the reaper. It would die, and close its end of the pipe, before
the write end closes, and its process group would survive.

The reaper forwards SIGTERM and SIGINT to the command, which knows how to stop its children. After the command
ends, leftover processes get GRACE_S to finish (multiprocessing's resource tracker frees shared memory then).
The reaper then exits with the command's exit code or signal.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import glob
import os
import resource
import select
import signal
import socket
import struct
import sys
import time
from collections.abc import Callable
from typing import NoReturn

F_SETSIG = 10
"""Linux fcntl command that sets the signal O_ASYNC sends."""
COMMAND_PID = "SKYLITE_COMMAND_PID"
"""Environment variable of the command and its descendants: process id and group id of the command.

A direct child of the command compares it with its parent to see whether the command is still alive.
"""
TEMPORARY_FOLDER = "SKYLITE_TEMPORARY_FOLDER"
"""Environment variable with the folder that is removed after the command and its descendants have ended."""
MARK = "SKYLITE_CHILD"
"""Environment variable with a unique value per command, inherited by its descendants.

The parent finds them by it when the reaper itself was killed.
"""
OWN_NETWORK = "SKYLITE_OWN_NETWORK"
"""Environment variable, "1": the command gets a network namespace with nothing but a loopback interface."""
OPENMP_FILE = "__KMP_REGISTERED_LIB_"
PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
CLONE_NEWUSER, CLONE_NEWNET = 0x10000000, 0x40000000
SIOCSIFFLAGS, IFF_UP = 0x8914, 1
FORWARDED_SIGNALS = (signal.SIGTERM, signal.SIGINT)
GRACE_S = 0.5
STOP_ROUNDS = 10
"""Looks for new descendants while they are stopped. Two do, unless they start each other very fast."""


def main() -> NoReturn:
    if sys.argv[1] == "own-network":
        enter_own_network()
        os._exit(0)
    parent_pipe, command = int(sys.argv[1]), sys.argv[2:]
    adopt_orphans()
    _prctl(PR_SET_PDEATHSIG, signal.SIGCONT)
    signals = _signal_pipe()
    pid = _start(command, parent_pipe)
    status = _watch(pid, parent_pipe, signals)
    if status is not None:
        _reap_for(GRACE_S)
    _kill_descendants()
    remove_leftovers(os.environ.get(TEMPORARY_FOLDER), os.environ.get(MARK))
    if status is None:
        os._exit(1)
    _exit_like(status)


def shared_memory_prefix(mark: str) -> str:
    """How the names of a command's files in shared memory begin, where it names them after its mark."""
    return f"skylite_{mark[:16]}_"


def remove_leftovers(temporary: str | None, mark: str | None) -> None:
    """Remove the temporary folder of the command, and what dead processes left in shared memory.

    A killed process does not remove its files: the queues and semaphores of an engine's processes
    (named by its plugin) and a file of Intel's OpenMP for each process.
    """
    if temporary:
        from skylite.processes.file_tree import remove_tree  # not before the end: a reaper stays small

        remove_tree(temporary)
    if mark:
        own = f"{shared_memory_prefix(mark)}*"
        for path in (*glob.glob(f"/dev/shm/{own}"), *glob.glob(f"/dev/shm/sem.{own}")):
            with contextlib.suppress(OSError):
                os.unlink(path)
    for path in glob.glob(f"/dev/shm/{OPENMP_FILE}*_{os.getuid()}"):
        pid = path.removeprefix(f"/dev/shm/{OPENMP_FILE}").partition("_")[0]
        if pid.isdigit() and not os.path.exists(f"/proc/{pid}"):
            with contextlib.suppress(OSError):
                os.unlink(path)


def die_with_parent(parent: int) -> None:
    """Let the kernel kill this process when its parent ends; exit now if it has ended already.

    `parent`: process id of this process's parent. Raises OSError when the kernel refuses.
    """
    _prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # the parent ended before prctl
        os._exit(1)


def adopt_orphans() -> None:
    """Let descendants whose parent ends become children of this process."""
    _prctl(PR_SET_CHILD_SUBREAPER, 1)


def kill_tree(root: int) -> None:
    """Kill a process with its group and its descendants, all stopped first: a stopped one starts no other."""
    stopped: list[int] = []
    for _ in range(STOP_ROUNDS):
        new = [pid for pid in (root, *descendants(root)) if pid not in stopped]
        if not new:
            break
        for pid in new:
            _signal(os.kill, pid, signal.SIGSTOP)
        stopped += new
    _signal(os.killpg, root, signal.SIGKILL)
    for pid in stopped:
        _signal(os.kill, pid, signal.SIGKILL)


def children(pid: int) -> set[int]:
    """Process ids of the children of a process, zombies too."""
    return set(_children_of_all().get(pid, ()))


def descendants(root: int) -> list[int]:
    """Process ids of the children of a process, of their children, and so on."""
    below = _children_of_all()
    pids = list(below.get(root, ()))
    for pid in pids:
        pids += below.get(pid, ())
    return pids


def _children_of_all() -> dict[int, list[int]]:
    below: dict[int, list[int]] = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            below.setdefault(_parent_of(name), []).append(int(name))
    return below


def _parent_of(pid: str) -> int:
    """Process id of the parent; 0 when the process is gone.

    In /proc/PID/stat it follows the process name, which may contain spaces and brackets.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as stream:
            return int(stream.read().rpartition(b")")[2].split()[1])
    except (FileNotFoundError, ProcessLookupError):
        return 0


def _signal(send: Callable[[int, int], None], pid: int, number: int) -> None:
    with contextlib.suppress(ProcessLookupError, PermissionError):
        send(pid, number)


def _prctl(option: int, value: int) -> None:
    if ctypes.CDLL(None, use_errno=True).prctl(option, value, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), f"prctl({option}) failed")


def _signal_pipe() -> int:
    """Read end of a pipe that receives the signal number as one byte for each signal."""
    read_end, write_end = os.pipe()
    os.set_blocking(read_end, False)
    os.set_blocking(write_end, False)
    signal.set_wakeup_fd(write_end)
    for number in (*FORWARDED_SIGNALS, signal.SIGCHLD):
        signal.signal(number, lambda *_: None)
    return read_end


def _start(command: list[str], parent_pipe: int) -> int:
    """Fork and exec the command; returns its process id."""
    # Block signals during the fork: until exec, the child still has the reaper's handlers.
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
    # Python ignores SIGPIPE and SIGXFSZ, and ignored signals stay ignored across exec.
    for number in (*FORWARDED_SIGNALS, signal.SIGCHLD, signal.SIGPIPE, signal.SIGXFSZ):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, FORWARDED_SIGNALS)
    try:
        if os.environ.get(OWN_NETWORK) == "1":
            enter_own_network()
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be started: {error.strerror}", file=sys.stderr, flush=True)
        os._exit(127)


def enter_own_network() -> None:
    """Move this process to a new network namespace, where only its own descendants can be. Raises OSError.

    Without root's rights a user namespace comes with it: the user keeps its number and gains nothing.
    """
    libc, uid, gid = ctypes.CDLL(None, use_errno=True), os.geteuid(), os.getegid()
    if libc.unshare(CLONE_NEWNET) != 0:
        if libc.unshare(CLONE_NEWUSER | CLONE_NEWNET) != 0:
            error = ctypes.get_errno()
            raise OSError(error, f"no network namespace: {os.strerror(error)}")
        maps = {"setgroups": "deny", "uid_map": f"{uid} {uid} 1", "gid_map": f"{gid} {gid} 1"}
        for name, text in maps.items():
            with open(f"/proc/self/{name}", "w") as stream:
                stream.write(text)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        fcntl.ioctl(any_socket, SIOCSIFFLAGS, struct.pack("16sH22x", b"lo", IFF_UP))


def _die_with_pipe(parent_pipe: int) -> None:
    """Lead a process group that the kernel kills when the last writer of the pipe is gone."""
    os.setpgid(0, 0)
    fcntl.fcntl(parent_pipe, fcntl.F_SETOWN, -os.getpid())
    fcntl.fcntl(parent_pipe, F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(parent_pipe, fcntl.F_SETFL, fcntl.fcntl(parent_pipe, fcntl.F_GETFL) | os.O_ASYNC)
    os.set_inheritable(parent_pipe, True)
    if select.select([parent_pipe], [], [], 0)[0]:  # the pipe closed before the setup
        os._exit(1)


def _watch(pid: int, parent_pipe: int, signals: int) -> int | None:
    """Wait for the command. Returns its wait status, or None when the parent is gone."""
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
    """Collect all ended children, adopted ones included. Returns the wait status of `pid` if it ended."""
    status = None
    while (ended := _wait_any(os.WNOHANG)) is not None and ended[0] != 0:
        if ended[0] == pid:
            status = ended[1]
    return status


def _wait_any(options: int) -> tuple[int, int] | None:
    """`waitpid` for any child; None when there are no children."""
    try:
        return os.waitpid(-1, options)
    except ChildProcessError:
        return None


def _reap_for(seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while _wait_any(os.WNOHANG) is not None and time.monotonic() < deadline:
        time.sleep(0.01)


def _kill_descendants() -> None:
    """Kill and collect until no descendant is left.

    Orphans become children of the reaper, so each round reaches deeper.
    """
    while _wait_any(os.WNOHANG) is not None:
        for pid in descendants(os.getpid()):
            _signal(os.kill, pid, signal.SIGKILL)
        time.sleep(0.005)


def _exit_like(status: int) -> NoReturn:
    """Exit with the exit code or signal of a wait status."""
    code = os.waitstatus_to_exitcode(status)
    if code < 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
        if -code != signal.SIGKILL:
            signal.signal(-code, signal.SIG_DFL)
        os.kill(os.getpid(), -code)
        time.sleep(1)
    os._exit(code if code >= 0 else 128 - code)


if __name__ == "__main__":
    # Behind the standard library, for `remove_leftovers`; nothing else there is imported.
    sys.path.append(os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__)))))
    main()
