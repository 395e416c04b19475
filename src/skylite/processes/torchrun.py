"""The trainer's command line and environment."""

from __future__ import annotations

import re
import sys
import uuid
from pathlib import Path

from skylite.processes.machine import LOOPBACK_ONLY
from skylite.processes.preload import TBB_MALLOC, preload_env

# glibc before 2.38 does not reuse a freed block for an aligned one of the same size, and torch aligns: a forward pass takes twice the
# memory that it keeps. TBB's allocator does, and keeps freed memory too (docs/explanation/trainer.md).
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456"}
"""Where TBB's is missing glibc at least keeps freed memory: a step reuses the same buffers, and touching fresh pages is slow."""


def trainer_command(run: Path, rendezvous: Path, num_ranks: int, *, resume: bool) -> list[str]:
    """torchrun with `num_ranks` processes of skylite.trainer.worker on this machine.

    `rendezvous`: an existing folder in which torchrun and the ranks find each other.
    """
    # Not --standalone: that meets over TCP on all interfaces without a key, and unpickles what it is told there. The ranks have a file of
    # their own (model/distributed.py). Every sign of life makes the file longer, and there is no other machine to tell.
    start = uuid.uuid4().hex
    meet = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", str(rendezvous / start)]
    meet += ["--rdzv-conf", "store_type=file,keep_alive_interval=3600", "--rdzv-id", start]
    command = [sys.executable, "-m", "torch.distributed.run", *meet, "--nproc-per-node", str(num_ranks)]
    return [*command, "-m", "skylite.trainer.worker", str(run), *(["--resume"] if resume else [])]


def trainer_env(num_threads: int) -> dict[str, str]:
    """Variables on top of the parent's: threads a rank, allocator, no hub."""
    return {
        **LOOPBACK_ONLY,
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Else Arrow brings an allocator of its own, which keeps 8 MB of every rank to read a step's completions.
        "ARROW_DEFAULT_MEMORY_POOL": "system",
        **ALLOCATOR,
        **preload_env(TBB_MALLOC, {}, "malloc"),
    }


_KILLED = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: -\d+ \(pid: (\d+)\)\s+\((SIG\w+)\)")


def killed_rank(log: str) -> str | None:
    """The first rank that a signal ended, by the summary torchrun leaves in its log: "rank 1 (process 77) was killed by SIGKILL".

    None where there is none. SIGTERM does not count: with that torchrun itself ends the ranks that are left.
    """
    for rank, pid, name in _KILLED.findall(log):
        if name != "SIGTERM":
            return f"rank {rank} (process {pid}) was killed by {name}"
    return None
