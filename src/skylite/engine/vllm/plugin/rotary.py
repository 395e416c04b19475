"""Rotary embeddings of LFM2 on CPU. Only vLLM's processes import this module.

vLLM's CPU kernel takes queries [tokens, heads, head size] for those of one head, and turns the wrong numbers:
LFM2's log-probabilities were wrong by up to a nat, with and without an adapter (vLLM 0.32.0). It is right for
[tokens, heads x head size], the form of other models.
"""

from __future__ import annotations

from typing import Any

import torch
from vllm.model_executor.layers.rotary_embedding.base import RotaryEmbedding

_FLATTENS = "skylite_flattens_heads"


def install() -> None:
    """Give vLLM's CPU kernel the form that it computes. Safe to call again."""
    rotate = RotaryEmbedding.forward_cpu
    if hasattr(rotate, _FLATTENS):
        return

    def rotate_flat(rotary: Any, positions: torch.Tensor, query: torch.Tensor, key: Any = None) -> Any:
        if positions.dim() != 1 or query.dim() != 3:
            return rotate(rotary, positions, query, key)
        flat_key = None if key is None else key.flatten(1)
        turned, turned_key = rotate(rotary, positions, query.flatten(1), flat_key)
        return turned.view_as(query), None if key is None else turned_key.view_as(key)

    setattr(rotate_flat, _FLATTENS, True)
    RotaryEmbedding.forward_cpu = rotate_flat
