"""The trainer's command line and environment."""

from __future__ import annotations

import sys
from pathlib import Path

from skylite.launch.libraries import TBB_MALLOC, preloading

# glibc before 2.38 does not reuse a freed block for an aligned one of the same size, and torch aligns: a forward pass takes twice the
# memory that it keeps. TBB's allocator does, and keeps freed memory too (docs/architecture.md, "Trainer").
ALLOCATOR = {"MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": "17179869184", "MALLOC_TOP_PAD_": "268435456"}
"""Where TBB's is missing glibc at least keeps freed memory: a step reuses the same buffers, and touching fresh pages is slow."""


def trainer_command(run: Path, num_ranks: int, *, resume: bool) -> list[str]:
    """torchrun with `num_ranks` processes of skylite.training.worker on this machine."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [*command, "-m", "skylite.training.worker", str(run), *(["--resume"] if resume else [])]


def trainer_env(num_threads: int) -> dict[str, str]:
    """Variables on top of the parent's: threads a rank, threads that sleep while they wait, allocator, no hub."""
    return {
        "OMP_NUM_THREADS": str(num_threads),
        "OMP_WAIT_POLICY": "passive",
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **ALLOCATOR,
        **preloading(TBB_MALLOC, {}, "malloc"),
    }
