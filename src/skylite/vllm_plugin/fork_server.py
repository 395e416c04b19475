"""Fast process start: multiprocessing's fork server imports vLLM in advance, and processes fork from it."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import context, forkserver

PRELOAD = "skylite.vllm_plugin.warm_imports"
"""The module that the fork server imports."""


def start_fork_server(env: Mapping[str, str]) -> None:
    """Start the fork server, which begins to import. `env` is added to this process's environment for it."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        forkserver.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)


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
