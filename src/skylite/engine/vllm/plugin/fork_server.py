"""Start processes fast: multiprocessing's fork server is a fork of this process and has its imports."""

from __future__ import annotations

import gc
import importlib
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from multiprocessing import context, forkserver, resource_tracker, util
from typing import Any

from skylite.processes.reaper import die_with_parent

TITLE = "skylite: fork server"
"""Process title. Without it, `ps` would show the command line of the API server."""


def import_early(modules: Sequence[str]) -> None:
    """Import modules for the children. Prints failed imports; the children raise them again."""
    for name in modules:
        try:
            importlib.import_module(name)
        except (ImportError, AttributeError, OSError, RuntimeError, ValueError) as error:
            print(f"skylite: {name} cannot be imported early: {error}", file=sys.stderr, flush=True)


def start_fork_server(env: Mapping[str, str]) -> None:
    """Fork this process. The copy is the fork server, with `env` added to its environment.

    The kernel kills the fork server when this process exits. The pipe that multiprocessing uses for this
    stays open in the children.
    """
    resource_tracker.ensure_running()  # an interpreter of its own, so before _forks
    if title := sys.modules.get("setproctitle"):
        title.getproctitle()  # must locate the title before the environment changes
    gc.collect()
    gc.freeze()  # a collection would copy every page that the processes share
    with _added(env), _forks():
        forkserver.ensure_running()


@contextmanager
def _added(env: Mapping[str, str]) -> Iterator[None]:
    """This process's environment with `env` added."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        yield
    finally:
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def _forks() -> Iterator[None]:
    """Let multiprocessing fork its fork server from this process."""
    parent, spawn = os.getpid(), util.spawnv_passfds

    def fork(path: bytes, args: Sequence[Any], passfds: Sequence[int]) -> int:
        if pid := os.fork():
            return pid
        die_with_parent(parent)
        if title := sys.modules.get("setproctitle"):
            title.setproctitle(TITLE)
        listener, alive = passfds
        forkserver.main(listener, alive, [])
        os._exit(0)

    util.spawnv_passfds = fork
    try:
        yield
    finally:
        util.spawnv_passfds = spawn


class WarmProcess(context.ForkServerProcess):
    """A child of the fork server with its starter's environment at `start`, like a spawned process."""

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self._environ)
        super().run()


class WarmContext(context.ForkServerContext):
    """Multiprocessing context that starts WarmProcess."""

    Process = WarmProcess
