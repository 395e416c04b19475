"""An adapter's file as one mapping with a view for each tensor: a load takes the time of its bytes, not of its hundreds of tensors.

`safetensors.safe_open` makes a storage of its own for every tensor: 26 to 36 ms for the 420 of a SmolLM2-135M adapter of rank 32, where
the mapping and its views take 3 to 6 (by hand, two cores). Imports vLLM only in `install`.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any

import safetensors
import torch
from torch import Tensor

DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
LENGTH_BYTES = 8
"""What the file begins with: the length of its header."""


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

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def keys(self) -> Iterable[str]:
        return self._tensors.keys()

    def get_tensor(self, name: str) -> Tensor:
        return self._tensors[name]


def open_adapter(path: str | Path, framework: str) -> Any:
    """The file as `safetensors.safe_open` gives it; by that where `mapped` does not know the file's form (its errors are in words)."""
    tensors = mapped(path)
    return safetensors.safe_open(path, framework=framework) if tensors is None else AdapterFile(tensors)


def mapped(path: str | Path) -> dict[str, Tensor] | None:
    """The file's tensors, in its order, as views of its mapping; None where they are not all of one float type or not in one row."""
    size = os.path.getsize(path)
    if size < LENGTH_BYTES:
        return None
    raw = torch.from_file(str(path), shared=False, size=size, dtype=torch.uint8)
    start = LENGTH_BYTES + int.from_bytes(raw[:LENGTH_BYTES].numpy().tobytes(), "little")
    try:
        header: dict[str, Any] = json.loads(raw[LENGTH_BYTES:start].numpy().tobytes())
        header.pop("__metadata__", None)
        entries = sorted(header.items(), key=lambda entry: entry[1]["data_offsets"])
        (kind,) = {DTYPES[entry["dtype"]] for _, entry in entries}
        shapes = [torch.Size(entry["shape"]) for _, entry in entries]
        if [entry["data_offsets"] for _, entry in entries] != _in_a_row(shapes, kind.itemsize):
            return None
        parts = torch.split(raw[start:].view(kind), [shape.numel() for shape in shapes])
    except (ValueError, KeyError, TypeError, AttributeError, RuntimeError):  # another form, or a damaged file
        return None
    return {name: part.view(shape) for (name, _), part, shape in zip(entries, parts, shapes, strict=True)}


def _in_a_row(shapes: Iterable[torch.Size], itemsize: int) -> list[list[int]]:
    """The bytes, from and to, of tensors that lie one after the other."""
    offsets, end = [], 0
    for shape in shapes:
        offsets.append([end, end := end + shape.numel() * itemsize])
    return offsets
