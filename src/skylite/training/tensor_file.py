"""Writing safetensors so that a disk that refuses says why."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors.torch import save
from torch import Tensor


def save_tensors(path: Path, tensors: Mapping[str, Tensor]) -> None:
    """Write a safetensors file. Raises OSError; safetensors' own writer hides errno in a text.

    The file is made in memory first: adapters and their moments are some tens of MiB.
    """
    path.write_bytes(save({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, metadata={"format": "pt"}))
