"""The process group of the trainer, as one small value."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Literal

import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

COLLECTIVE_TIMEOUT_S = 600.0
"""Ranks only meet in collectives that all of them are about to reach (never while one waits for rollouts), so this is a hang."""


@dataclass(frozen=True, slots=True)
class Dist:
    """This rank among the others. With one process there is a group of one, so that no code needs a special case."""

    dp_rank: int
    dp_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        return self.dp_rank == 0

    def all_reduce_sum_(self, values: Tensor) -> Tensor:
        """Sum in place over the ranks."""
        torch_dist.all_reduce(values)
        return values

    def all_reduce_max_(self, values: Tensor) -> Tensor:
        """Maximum in place over the ranks."""
        torch_dist.all_reduce(values, torch_dist.ReduceOp.MAX)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """[C] of this rank (C may differ between ranks) -> all of them, rank after rank."""
        sizes = torch.zeros(self.dp_size, dtype=torch.int64, device=self.device)
        sizes[self.dp_rank] = len(values)
        counts = self.all_reduce_sum_(sizes).tolist()
        padded = torch.nn.functional.pad(values, (0, max(counts) - len(values)))
        parts = [torch.empty_like(padded) for _ in counts]
        torch_dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def broadcast_(self, values: Tensor) -> Tensor:
        """Overwrite with rank 0's values."""
        torch_dist.broadcast(values, src=0)
        return values


@contextmanager
def process_group(device_type: Literal["cpu", "cuda"], rendezvous: Path | None = None) -> Iterator[Dist]:
    """Join the group that torchrun's environment describes; gloo on CPU, nccl on CUDA.

    `rendezvous`: folder for the file in which the ranks find each other; None: a TCP port that torchrun chose, on all interfaces.
    """
    dp_rank, dp_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = (
        torch.device(device_type, int(os.environ["LOCAL_RANK"]))
        if device_type == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if rendezvous is None:
        torch_dist.init_process_group(backend, timeout=timeout)
    else:
        torch_dist.init_process_group(
            backend, store=_file_store(rendezvous, dp_size), rank=dp_rank, world_size=dp_size, timeout=timeout
        )
    mesh = init_device_mesh(
        device.type, (dp_size,), mesh_dim_names=("fsdp",)
    )  # PEFT takes shards of a mesh of any other name for tensor parallel ones
    yield Dist(dp_rank, dp_size, device, mesh)
    # Not in a finally: after a failure the other ranks do not take part, and leaving politely would hang.
    torch_dist.destroy_process_group()


def _file_store(folder: Path, dp_size: int) -> FileStore:
    """The same file for all ranks of this start of torchrun, and for no other start."""
    return FileStore(str(folder / f"{os.environ['TORCHELASTIC_RUN_ID']}-ranks"), dp_size)


def set_threads(num_threads: int | None) -> None:
    """CPU threads of this rank: as configured, else the usable cores divided by the ranks of this machine."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(num_threads or max(1, len(os.sched_getaffinity(0)) // ranks))


@contextmanager
def half_the_threads() -> Iterator[None]:
    """While others work on the same cores (vLLM's start, an adapter being written and hashed): threads of a product wait for each other by
    spinning, long where one of them is not scheduled."""
    own = torch.get_num_threads()
    torch.set_num_threads(max(1, own // 2))
    try:
        yield
    finally:
        torch.set_num_threads(own)


def make_deterministic() -> None:
    """Only algorithms that give the same bits every time; torch raises RuntimeError where it has none. Before the first CUDA call."""
    os.environ.setdefault(
        "CUBLAS_WORKSPACE_CONFIG", ":4096:8"
    )  # else cuBLAS may choose another algorithm from run to run
    torch.use_deterministic_algorithms(True)
