"""Registers the tree attention backends with transformers."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface

from skylite.model.flex_attention import flex_tree_attention
from skylite.model.tree_attention import ModelMask, ScoreSettings, TreeLayout, tree_attention

IGNORED_KWARGS = {"position_ids", "cache_position", "position_embeddings", "sliding_window"}
"""Models pass these to attention although rotary embedding and the mask have already applied them."""

TreeAttention = Callable[[Tensor, Tensor, Tensor, TreeLayout, ScoreSettings], Tensor]
BACKENDS: dict[str, TreeAttention] = {"sdpa": tree_attention, "flex": flex_tree_attention}
"""By the value of trainer.attention."""


IMPLEMENTATIONS = {"sdpa": "skylite_tree", "flex": "skylite_tree_flex"}
"""transformers' `attn_implementation` of a backend. It takes a name with "sdpa" in it for its own sdpa, which
some models refuse."""


def register_backends() -> None:
    """Register all backends with transformers."""
    for backend, attention in BACKENDS.items():
        AttentionInterface.register(IMPLEMENTATIONS[backend], partial(attend, attention))
        AttentionMaskInterface.register(IMPLEMENTATIONS[backend], model_mask)


def model_mask(*, mask_function: Callable[..., Tensor], use_vmap: bool = False, **_: Any) -> ModelMask:
    """What the layers get as their `attention_mask`: the model's function of positions, not a tensor.

    Raises TypeError for a mask that a tree cannot keep.
    """
    mask = ModelMask(mask_function)
    if use_vmap or not mask.hides(0, 1):
        raise TypeError("tree attention does not support a mask that is not causal by position")
    return mask


def attend(
    attention: TreeAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: ModelMask | Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Run `attention` with the arguments of a transformers attention layer.

    Raises TypeError for an argument that tree attention does not support, instead of ignoring it.
    """
    tree: TreeLayout = kwargs.pop("tree")
    if not isinstance(attention_mask, ModelMask):
        raise TypeError("tree attention needs a mask that transformers makes")
    settings = ScoreSettings(
        kwargs.pop("scaling"), attention_mask, kwargs.pop("softcap", None), kwargs.pop("s_aux", None)
    )
    unknown = [k for k, v in kwargs.items() if k not in IGNORED_KWARGS and (isinstance(v, Tensor) or v)]
    if unknown:
        raise TypeError(f"tree attention does not support {unknown}")
    return attention(query, key, value, tree, settings).contiguous(), None
