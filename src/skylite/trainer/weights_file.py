"""Tensors to a safetensors file, hashed while they are written: straight out of memory, where `safetensors.torch.save` copies them twice.

Neighbours in memory are one part, so that of an adapter whose matrices are views of one tensor the file is a header and one part, and
neither the hash nor the write comes back to Python (and waits for its lock beside a forward pass) for every matrix.
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
WRITE_BYTES = 1 << 20
"""At once. For larger ones the kernel looks for large pages: by hand 39 MB took 0.15 s in one call beside a forward pass, else 0.015 s."""


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write CPU tensors (contiguous; float32 or bfloat16) and flush them to the disk. Returns the file's sha256 and size in bytes."""
    parts = _parts(tensors)
    # hashlib and write let go of the interpreter's lock, so the two run at once.
    with ThreadPoolExecutor(1) as pool, path.open("wb") as file:
        hashing = pool.submit(_sha256, parts)
        for part in parts:
            for start in range(0, len(part), WRITE_BYTES):
                file.write(part[start : start + WRITE_BYTES])
        file.flush()
        os.fsync(file.fileno())
        return hashing.result(), file.tell()


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the file that `write_weights` would write."""
    return _sha256(_parts(tensors))


def _parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file's bytes in order: length of the header, header, tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    runs: list[tuple[Tensor, int]] = []  # the first of neighbours in memory, and the bytes of all
    offset, end = 0, 0
    for name, tensor in sorted(tensors.items()):
        size = tensor.nbytes
        header[name] = {
            "dtype": DTYPES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + size],
        }
        if runs and tensor.data_ptr() == end and _same_memory(tensor, runs[-1][0]):
            runs[-1] = (runs[-1][0], runs[-1][1] + size)
        else:
            runs.append((tensor, size))
        offset, end = offset + size, tensor.data_ptr() + size
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % ALIGNMENT)
    return [
        memoryview(len(text).to_bytes(8, "little") + text),
        *(_bytes_from(first, size) for first, size in runs),
    ]


def _same_memory(one: Tensor, other: Tensor) -> bool:
    return one.untyped_storage().data_ptr() == other.untyped_storage().data_ptr()


def _bytes_from(first: Tensor, size: int) -> memoryview:
    """`size` bytes of the tensor's memory from its first number on."""
    return first.as_strided((size // first.element_size(),), (1,)).view(torch.uint8).numpy().data


def _sha256(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
