"""Masks by distance, as transformers makes them, and the same by hand."""

from __future__ import annotations

from typing import Any

import torch
from transformers.masking_utils import chunked_causal_mask_function, sliding_window_causal_mask_function

from skylite.model.tree_attention import ModelMask


def window_mask(window: int | None) -> ModelMask | None:
    """The mask of a sliding window. None: no mask."""
    return None if window is None else ModelMask(sliding_window_causal_mask_function(window))


def chunk_mask(chunk: int) -> ModelMask:
    """The mask of chunked attention (Llama 4)."""
    return ModelMask(chunked_causal_mask_function(chunk, torch.zeros(1, dtype=torch.int64)))


MASKS = {
    "none": None,
    "window 1": window_mask(1),
    "window 3": window_mask(3),
    "window 100": window_mask(100),
    "window 300": window_mask(300),
    "chunk 1": chunk_mask(1),
    "chunk 3": chunk_mask(3),
    "chunk 100": chunk_mask(100),
    "chunk 300": chunk_mask(300),
}


def sees(name: str, query: Any, key: Any) -> Any:
    """Whether a query sees a key of its path, by the rule of the mask `name`. Positions or arrays."""
    kind, _, size = name.partition(" ")
    if kind == "window":
        return (key <= query) & (query - key < int(size))
    return (key <= query) & (kind == "none" or query // int(size) == key // int(size))
