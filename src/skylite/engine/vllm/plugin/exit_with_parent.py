"""vLLM's helper processes exit when the process that started them exits.

In stock vLLM 0.32 the engine core does not watch the API server: if the server is killed, the core keeps
running and holds its memory (vllm#55510).
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, util

from skylite.processes.reaper import die_with_parent

SWITCH = "SKYLITE_ENGINE"
"""Environment variable, "1" in servers that skylite starts; other vLLM programs stay unchanged."""


def die_with_starter_in_forks() -> None:
    """Call `die_with_starter` also in children that multiprocessing forks from this process.

    vLLM forks its workers (tensor parallelism), and a fork does not load plugins again.
    """
    util.register_after_fork(die_with_starter, lambda function: function())


def die_with_starter() -> None:
    """In a multiprocessing child: let the kernel kill it when its starter exits. Elsewhere: do nothing.

    A process forked by a fork server exits with the fork server, which exits with the first process
    (`fork_server.py`).
    """
    starter = multiprocessing.parent_process()
    if os.environ.get(SWITCH) != "1" or starter is None or starter.pid is None:
        return
    die_with_parent(starter.pid if forkserver.get_inherited_fds() is None else os.getppid())
