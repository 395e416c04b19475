"""Registers the tree attention backends with transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from skylite.model.flex_attention import flex_tree_attention
from skylite.model.tree_attention import ScoreSettings, TreeLayout, tree_attention

IGNORED_KWARGS = {"position_ids", "cache_position", "position_embeddings"}
"""Models pass these to attention although rotary embedding has already applied them."""

TreeAttention = Callable[[Tensor, Tensor, Tensor, TreeLayout, ScoreSettings], Tensor]
BACKENDS: dict[str, TreeAttention] = {"sdpa": tree_attention, "flex": flex_tree_attention}
"""By the value of trainer.attention."""


def implementation(backend: str) -> str:
    """transformers' `attn_implementation` of a backend."""
    return f"skylite_tree_{backend}"


def register_backends() -> None:
    """Register all backends with transformers."""
    for backend, attention in BACKENDS.items():
        AttentionInterface.register(implementation(backend), partial(attend, attention))


def attend(
    attention: TreeAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run `attention` with the arguments of a transformers attention layer.

    Raises TypeError for an argument that tree attention does not support, instead of ignoring it.
    """
    tree: TreeLayout = kwargs.pop("tree")
    settings = ScoreSettings(
        kwargs.pop("scaling"), kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    )
    unknown = [k for k, v in kwargs.items() if k not in IGNORED_KWARGS and (isinstance(v, Tensor) or v)]
    if unknown or attention_mask is not None:
        raise TypeError(f"tree attention does not support {unknown or 'attention_mask'}")
    return attention(query, key, value, tree, settings).contiguous(), None
