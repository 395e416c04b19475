"""transformers' attention interface for `grpo.attention.tree_attention`."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn

from skylite.grpo.attention import TreeLayout, tree_attention

HARMLESS = {"position_ids", "cache_position", "position_embeddings"}
"""What models pass on to their attention function although rotary embedding has used it already."""


def attend(
    module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None, **kwargs: Any
) -> tuple[Tensor, None]:
    """Called by the model's attention layers; an argument we do not know is an error, never ignored."""
    tree: TreeLayout = kwargs.pop("tree")
    scaling, window, softcap = kwargs.pop("scaling"), kwargs.pop("sliding_window", None), kwargs.pop("softcap", None)
    unknown = [k for k, v in kwargs.items() if k not in HARMLESS and (isinstance(v, Tensor) or v)]
    if unknown or attention_mask is not None:
        raise TypeError(f"tree attention does not know {unknown or 'attention_mask'}")
    return tree_attention(query, key, value, tree, scaling=scaling, window=window, softcap=softcap).contiguous(), None
