"""Tensors to a safetensors file, hashed while they are written: straight out of memory, where `safetensors.torch.save` copies them twice.

Measured on 39 MB (420 tensors) and two cores: 0.05 to 0.1 s with the hash, against 0.23 to 0.26 s for save, hash and write in turn.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

DTYPES = {torch.float32: "F32", torch.bfloat16: "BF16"}
ALIGNMENT = 8
"""The format wants the tensors' bytes to begin at a multiple of this."""


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write CPU tensors (contiguous; float32 or bfloat16) and flush them to the disk. Returns the file's sha256 and size in bytes."""
    parts = _parts(tensors)
    # hashlib and write let go of the interpreter's lock, so the two run at once.
    with ThreadPoolExecutor(1) as pool, path.open("wb") as file:
        hashing = pool.submit(_sha256, parts)
        for part in parts:
            file.write(part)
        file.flush()
        os.fsync(file.fileno())
        return hashing.result(), file.tell()


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the file that `write_weights` would write."""
    return _sha256(_parts(tensors))


def _parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file's bytes in order: length of the header, header, tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    views, offset = [], 0
    for name, tensor in sorted(tensors.items()):
        view = tensor.reshape(-1).view(torch.uint8).numpy().data
        header[name] = {"dtype": DTYPES[tensor.dtype], "shape": list(tensor.shape), "data_offsets": [offset, offset + len(view)]}
        views.append(view)
        offset += len(view)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return [memoryview(len(text).to_bytes(8, "little") + text), *views]


def _sha256(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
