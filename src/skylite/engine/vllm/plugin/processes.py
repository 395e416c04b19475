"""vLLM's helper processes leave nothing behind: neither themselves nor their shared memory.

They exit when the process that started them exits. In stock vLLM 0.32 the engine core does not watch the API
server: if the server is killed, the core keeps running and holds its memory (vllm#55510).

With tensor parallelism, engine core and workers exchange messages through Python's SharedMemory, in files of
hundreds of MB with random names. The process that removes them dies with the others, so the reaper does.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import forkserver, shared_memory, util

from skylite.processes.reaper import MARK, die_with_parent, shared_memory_prefix

SWITCH = "SKYLITE_ENGINE"
"""Environment variable, "1" in servers that skylite starts; other vLLM programs stay unchanged."""
RANDOM_LETTERS = 12


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


def mark_shared_memory() -> None:
    """Name new shared memory of this process after its command's mark. The reaper removes such files."""
    if mark := os.environ.get(MARK):
        prefix = f"/{shared_memory_prefix(mark)}"
        # Python has no public setting for the names that it chooses.
        names = {"_SHM_NAME_PREFIX": prefix, "_SHM_SAFE_NAME_LENGTH": len(prefix) + RANDOM_LETTERS}
        for name, value in names.items():
            setattr(shared_memory, name, value)
        # Its children inherit the prefix of semaphores, which are files there too (sem.PREFIX-...).
        multiprocessing.current_process()._config["semprefix"] = prefix  # type: ignore[attr-defined]
