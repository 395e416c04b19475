"""The trainer's command line and environment."""

from __future__ import annotations

import os
import re
import sys
import uuid
from collections.abc import Sequence
from pathlib import Path

from skylite.processes.child_env import FEW_PRODUCTS, TBB_MALLOC, preload_env
from skylite.processes.gpus import cuda_env
from skylite.processes.hosts import TrainerStart, interface_env

SPINNING = {"OMP_WAIT_POLICY", "GOMP_SPINCOUNT"}
"""Variables by which a user says how threads wait for each other.

libgomp spins at first for longer than a time slice. If another program needs a core, that starves the thread
that is awaited. After 20,000 rounds, under a millisecond, it sleeps instead. Buys 2.5 times the speed beside
one busy program on two cores (benchmarks/NOTES.md).
"""


def trainer_command(
    run: Path, rendezvous: Path, num_ranks: int, start: TrainerStart, *, host: int = 0, sweep: bool = False
) -> list[str]:
    """torchrun with skylite.trainer.worker, for the run folder `run`, or that of a `sweep`.

    `host`: number of this machine, if the run has several.
    """
    words = [str(run), *["--resume"] * start.resume, *["--sweep"] * sweep]
    words += ["--host", str(host)] if host else []
    return torchrun_command(rendezvous, num_ranks, "skylite.trainer.worker", words, start.id, host)


def torchrun_command(
    rendezvous: Path, num_ranks: int, module: str, words: Sequence[str], start_id: str = "", host: int = 0
) -> list[str]:
    """torchrun with `num_ranks` processes of a module on this machine.

    Args:
        rendezvous: an existing folder for the rendezvous files of torchrun and the ranks.
        words: the module's arguments.
        start_id: names the files of the ranks; empty: a new one.
        host: names those of this machine's torchrun.
    """
    # Not --standalone: it opens a TCP store on all interfaces without a key, and unpickles what it receives
    # there. The ranks use another file store (model/process_group.py). The keep-alive interval is long,
    # because each message grows the file and no other machine waits for it.
    start = start_id or uuid.uuid4().hex
    own = rendezvous / (f"{start}-torchrun-{host}" if host else start)
    options = ["--nnodes", "1", "--rdzv-backend", "c10d", "--rdzv-endpoint", str(own)]
    options += ["--rdzv-conf", "store_type=file,keep_alive_interval=3600", "--rdzv-id", start]
    command = [sys.executable, "-m", "torch.distributed.run", *options, "--nproc-per-node", str(num_ranks)]
    return [*command, "-m", module, *words]


def trainer_env(num_threads: int, gpus: Sequence[int] = (), interface: str | None = None) -> dict[str, str]:
    """Variables added to the parent's environment: threads per rank, allocator, offline hub, GPUs.

    `interface`: where ranks of several machines listen.
    """
    return {
        **interface_env(interface),
        **cuda_env(gpus),
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "OMP_NUM_THREADS": str(num_threads),
        **({} if SPINNING & os.environ.keys() else {"GOMP_SPINCOUNT": "20000"}),
        "TOKENIZERS_PARALLELISM": "false",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        # Other sizes in every micro-batch would leave blocks that no later tensor fits.
        "PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True",
        # On Hopper, torch prefers cuDNN's attention, which builds a plan for every new shape of a piece.
        "TORCH_CUDNN_SDPA_DEPRIORITIZED": "1",
        # An image may set them to 1, and float32 products, which check the shortcuts and score the canary,
        # would then round to TF32's 10 bits. 0 forbids TF32; products of bfloat16 do not change.
        "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0",
        "NVIDIA_TF32_OVERRIDE": "0",
        # glibc before 2.38 does not reuse a freed block for an aligned one of the same size, and torch
        # aligns. TBB's allocator does. Buys memory: without it the peak of a train phase is 46 % higher.
        **preload_env(TBB_MALLOC, {}, "malloc"),
        **FEW_PRODUCTS,
    }


_KILLED = re.compile(r"rank\s+: (\d+) \(local_rank: \d+\)\s+exitcode\s+: -\d+ \(pid: (\d+)\)\s+\((SIG\w+)\)")


def killed_rank(log: str) -> str | None:
    """The first rank killed by a signal, such as "rank 1 (process 77) was killed by SIGKILL".

    Reads the summary in torchrun's log; None if there is none. Ignores SIGTERM, which torchrun itself sends
    to the remaining ranks.
    """
    for rank, pid, name in _KILLED.findall(log):
        if name != "SIGTERM":
            return f"rank {rank} (process {pid}) was killed by {name}"
    return None
