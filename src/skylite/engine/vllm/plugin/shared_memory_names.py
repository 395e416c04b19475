"""Names for what vLLM's processes put into shared memory, so that it can be removed after they were killed.

With tensor parallelism, vLLM's engine core and workers exchange messages through Python's SharedMemory, in
files of hundreds of MB with random names. The process that removes them dies with the others.
"""

from __future__ import annotations

import multiprocessing
import os
from multiprocessing import shared_memory

from skylite.processes.reaper import MARK, shared_memory_prefix

RANDOM_LETTERS = 12


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
