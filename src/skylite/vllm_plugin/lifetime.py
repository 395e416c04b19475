"""vLLM's helper processes end with the process that started them.

Stock vLLM 0.32's engine core does not watch the API server: when that is killed, the core lives on and holds memory (vllm#55510).
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver

from skylite.processes.parent_death import die_with_parent

SWITCH = "SKYLITE_ENGINE"
"""Environment variable that is "1" in servers that skylite starts; a plugin must not change vLLM for other programs."""


def die_with_starter() -> None:
    """In a process that multiprocessing made: the kernel kills it when its starter ends. In the first process of a server: nothing.

    Out of a fork server it ends with that, which ends with the first process (`warm.py`).
    """
    starter = multiprocessing.parent_process()
    if os.environ.get(SWITCH) != "1" or starter is None or starter.pid is None:
        return
    die_with_parent(starter.pid if forkserver.get_inherited_fds() is None else os.getppid())
