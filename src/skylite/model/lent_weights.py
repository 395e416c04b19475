"""Frozen weights that leave a GPU while others need its memory, and come back with the same bits."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor


class LentWeights:
    """The storages behind tensors that never change. The tensors stay valid, but for their content.

    The machine's memory keeps a copy from the first time on. It is not pinned: torch would round each size up
    to a power of two. Tensors that are not on the device, such as those of trainer.offload, stay where they
    are. So do those that torch did not allocate: on a CPU, some are a mapped file.
    """

    def __init__(self, tensors: Iterable[Tensor], device: torch.device) -> None:
        local = (t.to_local() if isinstance(t, DTensor) else t for t in tensors)
        there = (t.untyped_storage() for t in local if t.device.type == device.type and not t.is_meta)
        movable = {s.data_ptr(): s for s in there if s.nbytes() and s.resizable()}
        self._storages: list[UntypedStorage] = list(movable.values())
        self._copies: list[UntypedStorage] = []
        self.is_here = True
        self.num_bytes = sum(storage.nbytes() for storage in self._storages)

    def leave(self) -> None:
        """Give the memory of all back to torch's allocator."""
        if not self.is_here:
            return
        if not self._copies:
            self._copies = [_on_cpu(storage) for storage in self._storages]
        for storage in self._storages:
            storage.resize_(0)
        self.is_here = False

    def come_back(self) -> None:
        """Restore all."""
        if self.is_here:
            return
        for storage, copy in zip(self._storages, self._copies, strict=True):
            storage.resize_(copy.nbytes())
            storage.copy_(copy)
        self.is_here = True


def _on_cpu(storage: UntypedStorage) -> UntypedStorage:
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8).untyped_storage()
    copy.copy_(storage)
    return copy
