"""Writes tensors to a safetensors file and hashes them at the same time.

`safetensors.torch.save` would copy all tensors twice in memory. Tensors that are adjacent in memory are
written as one part: an adapter whose matrices are views of one tensor needs a header and one part. Per-matrix
writes would each wait for the GIL beside the canary's forward pass.
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
"""The format requires that tensor data starts at a multiple of this many bytes."""
WRITE_BYTES = 1 << 20
"""Bytes per write call. For larger writes the kernel searches for large pages, which is slow."""


def write_weights(path: Path, tensors: Mapping[str, Tensor]) -> tuple[str, int]:
    """Write contiguous float32 or bfloat16 CPU tensors and fsync. Returns the file's sha256 and its bytes."""
    parts = _parts(tensors)
    # hashlib and write release the GIL, so they run in parallel.
    with ThreadPoolExecutor(1) as pool, path.open("wb") as file:
        hashing = pool.submit(_sha256, parts)
        for part in parts:
            for start in range(0, len(part), WRITE_BYTES):
                file.write(part[start : start + WRITE_BYTES])
        file.flush()
        os.fsync(file.fileno())
        return hashing.result(), file.tell()


def weights_sha256(tensors: Mapping[str, Tensor]) -> str:
    """The sha256 of the file that `write_weights` would write for `tensors`."""
    return _sha256(_parts(tensors))


def _parts(tensors: Mapping[str, Tensor]) -> list[memoryview]:
    """The file's bytes in order: header length, header, tensors."""
    header: dict[str, object] = {"__metadata__": {"format": "pt"}}
    runs: list[tuple[Tensor, int]] = []  # (first tensor, bytes) of each run of adjacent tensors
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
    """`size` bytes of memory, starting at the tensor's first element."""
    return first.as_strided((size // first.element_size(),), (1,)).view(torch.uint8).numpy().data


def _sha256(parts: Sequence[memoryview]) -> str:
    digest = hashlib.sha256()
    for part in parts:
        digest.update(part)
    return digest.hexdigest()
