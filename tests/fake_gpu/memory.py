"""Counts the live bytes of tensors, real or fake, while a program runs."""

from __future__ import annotations

import weakref
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

CUDA_BLOCK = 512
"""torch's CUDA allocator rounds every allocation up to a multiple of this many bytes."""


@dataclass(frozen=True, slots=True)
class Allocation:
    num_bytes: int
    shape: tuple[int, ...]
    operation: str


class LiveBytes(TorchDispatchMode):
    """Inside, counts the bytes of every new storage until it is freed.

    What an operation allocates and frees within itself is not seen. Tensors made before are not counted,
    until an operation returns them.
    """

    supports_higher_order_operators = True

    def __init__(self, device: str = "cuda", multiple: int = CUDA_BLOCK) -> None:
        super().__init__()
        self.now = self.peak = 0
        self.at_peak = ""
        """The operation that reached the peak."""
        self.allocations: list[Allocation] = []
        self._device, self._multiple = device, multiple
        self._sizes: dict[int, int] = {}
        self._refs: dict[int, Any] = {}

    def add(self, tensor: Tensor, operation: str) -> None:
        """Count the storage of `tensor`, once."""
        if tensor.device.type != self._device:
            return
        storage = tensor.untyped_storage()
        key = id(storage)
        if key in self._sizes:
            return
        size = -(-storage.nbytes() // self._multiple) * self._multiple
        self._sizes[key] = size
        self._refs[key] = weakref.ref(storage, lambda _: self._freed(key))
        self.allocations.append(Allocation(storage.nbytes(), tuple(tensor.shape), operation))
        self.now += size
        if self.now > self.peak:
            self.peak, self.at_peak = self.now, operation

    def reset_peak(self) -> int:
        """Forget the peak and the allocations; returns the live bytes."""
        self.peak, self.allocations = self.now, []
        return self.now

    def largest(self) -> Allocation:
        return max(self.allocations, key=lambda a: a.num_bytes)

    def _freed(self, key: int) -> None:
        self.now -= self._sizes.pop(key)
        del self._refs[key]

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor):
                self.add(leaf, str(func))
        return out
