"""Processes out of multiprocessing's fork server, which has imported what they need before it is asked for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import context, forkserver

PRELOAD = "skylite.vllm_plugin.warm"
"""The module that the fork server imports."""


def start_fork_server(env: Mapping[str, str]) -> None:
    """Start it, with `env` on top of this process's environment; it begins to import."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        forkserver.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


class WarmProcess(context.ForkServerProcess):
    """A child of the fork server with the environment that its starter has by then, as vLLM's spawned processes have it."""

    def start(self) -> None:
        self._environ = dict(os.environ)
        super().start()

    def run(self) -> None:
        os.environ.update(self._environ)
        super().run()


class WarmContext(context.ForkServerContext):
    Process = WarmProcess
