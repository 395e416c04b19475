"""The trainer's process group: collectives over data-parallel ranks, threads and determinism."""

from __future__ import annotations

import base64
import json
import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal, TypeVar, cast

import numpy as np
import torch
import torch.distributed as torch_dist
from torch import Tensor
from torch._C._distributed_c10d import FileStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from skylite.processes.hardware import threads_per_rank
from skylite.types import ImageTokens, TrainingExample

COLLECTIVE_TIMEOUT_S = 600.0
"""Longest wait in a collective. A longer one is a hang: see `Dist.wait_for`."""
KEEP_ALIVE_S = 30.0
POLL_S = 0.02
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Dist:
    """This rank and its process group. A single process is a group of one, without special cases in code."""

    dp_rank: int
    dp_size: int
    device: torch.device
    mesh: DeviceMesh

    @property
    def is_main(self) -> bool:
        """Whether this is rank 0, which prints and writes files."""
        return self.dp_rank == 0

    def all_reduce_sum_(self, values: Tensor) -> Tensor:
        """Sum over all ranks, in place."""
        torch_dist.all_reduce(values)
        return values

    def all_reduce_max_(self, values: Tensor) -> Tensor:
        """Maximum over all ranks, in place."""
        torch_dist.all_reduce(values, torch_dist.ReduceOp.MAX)
        return values

    def all_gather(self, values: Tensor) -> Tensor:
        """Concatenate the [C] of all ranks in rank order. C may differ between ranks."""
        sizes = torch.zeros(self.dp_size, dtype=torch.int64, device=self.device)
        sizes[self.dp_rank] = len(values)
        counts = self.all_reduce_sum_(sizes).tolist()
        padded = torch.nn.functional.pad(values, (0, max(counts) - len(values)))
        parts = [torch.empty_like(padded) for _ in counts]
        torch_dist.all_gather(parts, padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def broadcast_(self, values: Tensor) -> Tensor:
        """Overwrite `values` with those of rank 0."""
        torch_dist.broadcast(values, src=0)
        return values

    def share(self, value: T | None) -> T:
        """The value of rank 0 on every rank; the others pass None. JSON, or examples in lists.

        Equal images are sent once, and one object afterwards.

        As bytes: torch's own function for objects unpickles what a peer sends, which can be any code. By
        gloo, also beside NCCL: a rank that waits in NCCL keeps its GPU busy.
        """
        if self.dp_size == 1:
            return cast(T, value)
        text = bytearray(json.dumps(value, default=_Encoder()).encode() if self.is_main else b"")
        size = self.broadcast_(torch.tensor([len(text)]))
        body = (
            torch.frombuffer(text, dtype=torch.uint8) if text else torch.empty(int(size), dtype=torch.uint8)
        )
        return cast(T, json.loads(self.broadcast_(body).numpy().tobytes(), object_hook=_Decoder()))

    def wait_for(self, look: Callable[[], T | None]) -> T:
        """What `look` returns on rank 0, which alone calls it, once that is not None. All ranks call it.

        Rank 0 shares a sign of life every KEEP_ALIVE_S, so that the wait does not time out.
        """
        while True:
            value = self.share(_poll(look) if self.is_main else None)
            if value is not None:
                return value


_ARRAY, _EXAMPLE, _IMAGE = "array of a rank", "example of a rank", "image of a rank"


class _Encoder:
    """What JSON lacks, for one message. The first of equal images has the file, the others its number."""

    def __init__(self) -> None:
        self.files: dict[bytes, int] = {}

    def __call__(self, value: object) -> dict[str, Any]:
        if isinstance(value, np.ndarray) and value.ndim == 1:
            return {_ARRAY: [value.dtype.str, base64.b64encode(value.tobytes()).decode()]}
        if isinstance(value, TrainingExample):
            return {_EXAMPLE: {f.name: getattr(value, f.name) for f in fields(value)}}
        if isinstance(value, ImageTokens):
            file = None if value.data in self.files else base64.b64encode(value.data).decode()
            number = self.files.setdefault(value.data, len(self.files))
            return {_IMAGE: [value.start, value.length, number, file]}
        raise TypeError(f"ranks do not share a {type(value).__name__}")


class _Decoder:
    """The values of an `_Encoder`. JSON is read in the order in which it was written."""

    def __init__(self) -> None:
        self.files: list[bytes] = []

    def __call__(self, value: dict[str, Any]) -> Any:
        if _ARRAY in value:
            dtype, data = value[_ARRAY]
            return np.frombuffer(base64.b64decode(data), dtype=np.dtype(dtype)).copy()  # refuses objects
        if _IMAGE in value:
            start, length, number, file = value[_IMAGE]
            if file is not None:
                self.files.append(base64.b64decode(file))
            return ImageTokens(start, length, self.files[number])
        if _EXAMPLE in value:
            example = value[_EXAMPLE]
            return TrainingExample(**example | {"images": tuple(example["images"])})
        return value


def _poll(look: Callable[[], T | None]) -> T | None:
    """What `look` returns, once it is not None, or None after KEEP_ALIVE_S."""
    deadline = time.monotonic() + KEEP_ALIVE_S
    while (value := look()) is None and time.monotonic() < deadline:
        time.sleep(POLL_S)
    return value


@contextmanager
def process_group(device_type: Literal["cpu", "cuda"], rendezvous: Path | None = None) -> Iterator[Dist]:
    """Join the group that torchrun's environment describes, with gloo on a CPU, and NCCL beside it on GPUs.

    `rendezvous`: folder for the file through which ranks find each other. None: a TCP port that torchrun
    chooses and that listens on all interfaces.
    """
    dp_rank, dp_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    device = (
        torch.device(device_type, int(os.environ["LOCAL_RANK"]))
        if device_type == "cuda"
        else torch.device("cpu")
    )
    if device.type == "cuda":
        torch.cuda.set_device(device)
    backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo"
    timeout = timedelta(seconds=COLLECTIVE_TIMEOUT_S)
    if rendezvous is None:
        torch_dist.init_process_group(backend, timeout=timeout)
    else:
        torch_dist.init_process_group(
            backend, store=_file_store(rendezvous, dp_size), rank=dp_rank, world_size=dp_size, timeout=timeout
        )
    # PEFT treats a mesh of any other name as tensor parallel.
    mesh = init_device_mesh(device.type, (dp_size,), mesh_dim_names=("fsdp",))
    yield Dist(dp_rank, dp_size, device, mesh)
    # Not in a finally block: after a failure the other ranks do not take part, so this call would hang.
    torch_dist.destroy_process_group()


def _file_store(folder: Path, dp_size: int) -> FileStore:
    """One file per torchrun start, shared by its ranks."""
    return FileStore(str(folder / f"{os.environ['TORCHELASTIC_RUN_ID']}-ranks"), dp_size)


def set_threads(num_threads: int | None) -> None:
    """Set the CPU threads of this rank. None: usable cores divided by the ranks on this machine."""
    ranks = int(os.environ["LOCAL_WORLD_SIZE"])
    torch.set_num_threads(num_threads or threads_per_rank(ranks))


@contextmanager
def half_the_threads() -> Iterator[None]:
    """Use half of the CPU threads while other work shares the cores.

    Such work is an engine's start. Threads of a matrix product wait for each other by spinning, which wastes
    cores while one of them waits for the scheduler. Buys 9 s of start.
    """
    num_threads = torch.get_num_threads()
    torch.set_num_threads(max(1, num_threads // 2))
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def make_deterministic() -> None:
    """Use only algorithms that give the same bits every time. Call it before the first CUDA call.

    torch raises RuntimeError later for an operation that has no such algorithm.
    """
    # Without this, cuBLAS may choose another algorithm in each run.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
