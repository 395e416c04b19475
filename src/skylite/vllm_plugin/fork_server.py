"""Processes out of multiprocessing's fork server, which has imported what they need before it is asked for them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from multiprocessing import context, forkserver

PRELOAD = "skylite.vllm_plugin.warm"
"""The module that the fork server imports."""


def omp_settings(cpus: str) -> dict[str, str]:
    """What vLLM sets for a worker under Intel's OpenMP (vllm/utils/ompmultiprocessing.py): a thread on each of the cores "0,1"."""
    return {
        "OMP_NUM_THREADS": str(len(cpus.split(","))),
        "KMP_AFFINITY": f"granularity=fine,explicit,proclist=[{cpus}]",
        "KMP_BLOCKTIME": "5",
        "KMP_TPAUSE": "0",
    }


def warm_up(env: Mapping[str, str]) -> None:
    """Start the fork server, which begins to import, with `env` on top of this process's environment."""
    before = dict(os.environ)
    os.environ.update(env)
    try:
        forkserver.set_forkserver_preload([PRELOAD])
        forkserver.ensure_running()
    finally:
        for name in env.keys() - before.keys():
            del os.environ[name]
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
