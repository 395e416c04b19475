"""Functions that the tests of the sandbox run in it."""

from __future__ import annotations

import ctypes
import mmap
import os
import platform
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any


def make_runner(*arguments: Any) -> Callable[..., Any]:
    """A function that runs another one of this file by name."""
    calls: list[str] = []

    def run(name: str, *values: Any) -> Any:
        calls.append(name)
        return {"calls": calls, "arguments": arguments}.get(name) or globals()[name](*values)

    return run


def fail_to_load() -> None:
    raise LookupError("no such task")


def evaluate(text: str) -> Any:
    """What a careless scorer does."""
    return eval(text, {name: globals()[name] for name in ("ctypes", "os", "socket", "signal", "subprocess")})


def error_of(work: Callable[[], Any]) -> str:
    """Name of the exception, or "" if the work succeeded."""
    try:
        work()
    except BaseException as error:  # noqa: BLE001
        return type(error).__name__
    return ""


def write_at(path: str) -> str:
    return error_of(lambda: Path(path).write_text("x"))


def read_at(path: str) -> str:
    return error_of(lambda: Path(path).read_bytes())


def touch_every_way(path: str) -> dict[str, str]:
    """Way -> exception, for changes of an existing file and its folder."""
    folder = os.path.dirname(path)
    ways: dict[str, Callable[[], Any]] = {
        "append": lambda: os.open(path, os.O_WRONLY | os.O_APPEND),
        "truncate": lambda: os.truncate(path, 0),
        "chmod": lambda: os.chmod(path, 0o777),
        "chown": lambda: os.chown(path, os.getuid(), os.getgid()),
        "utime": lambda: os.utime(path),
        "unlink": lambda: os.unlink(path),
        "rename": lambda: os.rename(path, path + "2"),
        "link": lambda: os.link(path, path + "3"),
        "symlink": lambda: os.symlink(path, path + "4"),
        "mkdir": lambda: os.mkdir(folder + "/new"),
        "fifo": lambda: os.mkfifo(folder + "/fifo"),
        "xattr": lambda: os.setxattr(path, "user.a", b"b"),
        "read and truncate": lambda: os.open(path, os.O_RDONLY | os.O_TRUNC),
        "directory handle": lambda: os.open("new", os.O_CREAT, dir_fd=os.open(folder, os.O_PATH)),
    }
    return {name: error_of(work) for name, work in ways.items()}


def reach_out(path: str, pid: int) -> dict[str, str]:
    """Way -> exception, for sockets, processes and signals. `path`: a listening socket. `pid`: its owner."""
    libc = ctypes.CDLL(None, use_errno=True)
    x86 = platform.machine() == "x86_64"

    def system(number: int, *arguments: int) -> None:
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    ways: dict[str, Callable[[], Any]] = {
        "internet": lambda: socket.create_connection(("127.0.0.1", 9), 1),
        "unix": lambda: socket.socket(socket.AF_UNIX).connect(path),
        "socketpair": socket.socketpair,
        "netlink": lambda: socket.socket(socket.AF_NETLINK, socket.SOCK_RAW),
        "io_uring": lambda: system(425, 1, 0),
        "shell": lambda: subprocess.run(["/bin/true"], check=True),
        "fork": lambda: os.fork() or os._exit(0),
        "namespace": lambda: system(272, 0x10000000),
        "signal": lambda: os.kill(pid, 0),
        "group": lambda: os.kill(0, signal.SIGCONT),
        "parent": lambda: os.kill(os.getppid(), signal.SIGCONT),
        "memory": lambda: os.open(f"/proc/{pid}/mem", os.O_RDWR),
        "ptrace": lambda: system(101, 16, pid, 0, 0),
        "priority": lambda: os.setpriority(os.PRIO_PROCESS, pid, 19),
        "mount": lambda: system(165, 0, 0, 0, 0, 0),
        "new system call": lambda: system(466, 0),
        "program": lambda: os.execv("/bin/true", ["true"]),
        "program by descriptor": lambda: os.execve(os.open("/usr/bin", os.O_PATH), ["true"], {}),
        "inotify": lambda: system(294 if x86 else 26, 0),
        "asynchronous input": lambda: system(206 if x86 else 0, 1, ctypes.addressof(ctypes.c_ulong())),
        "own filter": lambda: system(317 if x86 else 277, 1, 8, 0),
    }
    return {name: error_of(work) for name, work in ways.items()}


def fill_memory() -> int:
    return len(bytearray(8 << 30))


def hold_memory(count: int) -> dict[str, str]:
    """Way -> exception, for memory of `count` bytes that no mapping of this process may hold."""
    libc = ctypes.CDLL(None, use_errno=True)
    x86 = platform.machine() == "x86_64"

    def system(number: int, *arguments: int) -> None:
        if libc.syscall(number, *arguments) < 0:
            raise OSError(ctypes.get_errno(), "refused")

    def give_pages_to_a_pipe() -> None:
        page = ctypes.create_string_buffer(4096)
        vector = (ctypes.c_size_t * 2)(ctypes.addressof(page), 4096)
        system(278 if x86 else 75, os.pipe()[1], ctypes.addressof(vector), 1, 0)

    ways: dict[str, Callable[[], Any]] = {
        "memfd": lambda: os.write(os.memfd_create("held"), bytes(1 << 20)),
        "secret memfd": lambda: system(447, 0),
        "pipe": give_pages_to_a_pipe,
        "SysV shared memory": lambda: system(29 if x86 else 194, 0, count, 0o1600),
        "shared anonymous mapping": lambda: mmap.mmap(-1, count),
    }
    return {name: error_of(work) for name, work in ways.items()}


def burn() -> None:
    while True:
        pass


def ignore_limits() -> None:
    signal.signal(signal.SIGXCPU, signal.SIG_IGN)
    burn()


def sleep() -> None:
    time.sleep(600)


def talk(count: int) -> str:
    print("printed", file=sys.stderr)
    os.write(1, b"written")
    return "x" * count


def leave() -> None:
    os._exit(3)


def abort() -> None:
    os.abort()


def exit_politely() -> None:
    sys.exit("done")


def interrupt() -> None:
    raise KeyboardInterrupt


def start_thread() -> str:
    return error_of(threading.Thread(target=time.sleep, args=(0,)).start)


def forge(text: str) -> None:
    """Write an answer of its own to every open pipe."""
    for descriptor in range(3, 64):
        try:
            os.write(descriptor, text.encode())
        except OSError:
            continue
    os._exit(0)


def environment() -> dict[str, str]:
    return dict(os.environ)
