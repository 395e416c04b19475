"""An adapter's file as one mapping with a view for each tensor: a load takes the time of its bytes, not of its hundreds of tensors.

`safetensors.safe_open` makes a storage of its own for every tensor: 26 to 36 ms for the 420 of a SmolLM2-135M adapter of rank 32, where
the mapping and its views take 6 (by hand, two cores). Imports vLLM only in `install`.
"""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import safetensors
import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


def install() -> None:
    """Have vLLM's LoRA models open their files by `open_adapter`. May be called any number of times."""
    from vllm.lora import lora_model

    # The one name that vLLM reads an adapter's tensors by.
    lora_model.safetensors = SimpleNamespace(safe_open=open_adapter)


class AdapterFile:
    """What vLLM uses of safetensors' open file. The tensors stay valid after it is closed, and after the file is deleted."""

    def __init__(self, tensors: dict[str, Tensor]) -> None:
        self._tensors = tensors

    def __enter__(self) -> AdapterFile:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def open_adapter(path: str | Path, framework: str) -> Any:
    """The file as `safetensors.safe_open` gives it; by that itself where `mapped` does not take the file. Raises SafetensorError."""
    tensors = mapped(path)
    return safetensors.safe_open(path, framework=framework) if tensors is None else AdapterFile(tensors)


def mapped(path: str | Path) -> dict[str, Tensor] | None:
    """The file's tensors, in its order, as views of its mapping; None where they are not all of one of DTYPES. Raises SafetensorError."""
    with safetensors.safe_open(path, framework="numpy") as file:  # checks the whole header; reads no tensor
        slices = {name: file.get_slice(name) for name in file.offset_keys()}
    kinds = {part.get_dtype() for part in slices.values()}
    if len(kinds) != 1 or not kinds <= DTYPES.keys():
        return None
    kind = DTYPES[kinds.pop()]
    shapes = [torch.Size(part.get_shape()) for part in slices.values()]
    sizes = [shape.numel() for shape in shapes]
    raw = torch.from_file(str(path), shared=False, size=os.path.getsize(path), dtype=torch.uint8)
    # The format has the tensors one after the other, without a gap, up to the file's end.
    parts = torch.split(raw[len(raw) - sum(sizes) * kind.itemsize :].view(kind), sizes)
    return {name: part.view(shape) for name, part, shape in zip(slices, parts, shapes, strict=True)}
