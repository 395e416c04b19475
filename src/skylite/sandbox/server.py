"""The process behind a Sandbox: it prepares one function, then runs each call in a confined copy of itself.

The server isolates itself before it imports the function, and its copies (forked_workers.py) inherit that.
Requests are trusted; what a copy answers is not, so it is only passed on as bytes. Imports only the standard
library.

If the function has a method `prepare`, this process calls it after the first answer to a call that is not
`fresh`, for work that later calls need not repeat. The limits of a call hold for it.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import resource
import select
import signal
import socket
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any, NoReturn

from skylite.processes.file_tree import empty_folder
from skylite.sandbox.bounded_folder import mount_bounded
from skylite.sandbox.confine import SETUP_BYTES, Protection, isolate, lower_limit
from skylite.sandbox.count_threads import count_threads
from skylite.sandbox.forked_workers import Copies
from skylite.sandbox.landlock import landlock_version
from skylite.sandbox.messages import receive, send
from skylite.sandbox.seccomp import architecture

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
    arch, resets = architecture(), None
    if arch is not None:
        resets = count_threads(arch, private=(requests, replies, life, memory))
    protection = Protection(landlock_version(), resets is not None, is_bounded)
    try:
        isolate([Path(p) for p in request["readable"]], scratch)
        _check_isolation(scratch)
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
    copies = Copies(function, memory, requests, (replies, life), scratch, protection, resets)
    _serve(function, copies, replies)


def _serve(function: Callable[..., Any], copies: Copies, replies: int) -> NoReturn:
    """Answer requests of two messages: the limits of a call, and its arguments."""
    prepare = getattr(function, "prepare", None)
    while True:
        copies.wait()
        limits, arguments = receive(copies.requests), receive(copies.requests)
        if limits is None or arguments is None:
            os._exit(0)
        request = json.loads(limits)
        if copies.scratch is not None and empty_folder(copies.scratch) is not None:
            send(replies, ["dirty"])
            continue
        reply = copies.call(request, arguments)
        send(replies, reply)
        if prepare is not None and reply[0] == "answer" and not request["fresh"]:
            _prepare(prepare, request, copies.memory)
            prepare = None


def _die_with(life: int) -> None:
    """Let the kernel kill this process when the parent's end of the pipe is gone, also during an import."""
    import fcntl

    fcntl.fcntl(life, fcntl.F_SETOWN, os.getpid())
    fcntl.fcntl(life, _F_SETSIG, signal.SIGKILL)
    fcntl.fcntl(life, fcntl.F_SETFL, fcntl.fcntl(life, fcntl.F_GETFL) | os.O_ASYNC)
    if select.select([life], [], [], 0)[0]:
        os._exit(1)


def _check_isolation(scratch: Path | None) -> None:
    """Try what must not work. Raises OSError if it does."""
    with contextlib.suppress(PermissionError):
        socket.socket().close()
        raise OSError(0, "a socket could be opened in the sandbox")
    with contextlib.suppress(PermissionError):
        os.close(os.open(f"/tmp/skylite-sandbox-{os.getpid()}", os.O_WRONLY | os.O_CREAT, 0o600))
        raise OSError(0, "a file could be written in the sandbox")


def _prepare(prepare: Callable[[], None], request: dict[str, Any], memory: int) -> None:
    """Call `prepare` here, within the limits of one call."""
    used, pages = resource.getrusage(resource.RUSAGE_SELF), int(os.pread(memory, 64, 0).split()[0])
    limits = {
        resource.RLIMIT_AS: pages * os.sysconf("SC_PAGE_SIZE") + request["memory_bytes"],
        resource.RLIMIT_CPU: int(used.ru_utime + used.ru_stime) + 1 + request["cpu_s"],
    }
    before = {kind: resource.getrlimit(kind) for kind in limits}
    for kind, most in limits.items():
        lowest = [n for n in (most, *before[kind]) if n != resource.RLIM_INFINITY]
        resource.setrlimit(kind, (min(lowest), before[kind][1]))
    with contextlib.suppress(Exception):  # then each call does the work itself
        prepare()
    for kind, values in before.items():
        resource.setrlimit(kind, values)
    gc.collect()
    gc.freeze()


def make_nothing() -> Callable[[], None]:
    """The factory of a function that does nothing, to try whether this machine has a sandbox."""
    return lambda: None
