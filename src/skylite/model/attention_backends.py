"""transformers' attention interface for the forms of attention over a tree."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface

from skylite.model.flex_attention import flex_tree_attention
from skylite.model.tree_attention import Scoring, TreeLayout, tree_attention

HARMLESS = {"position_ids", "cache_position", "position_embeddings"}
"""What models pass on to their attention function although rotary embedding has used it already."""


TreeAttention = Callable[[Tensor, Tensor, Tensor, TreeLayout, Scoring], Tensor]
FORMS: dict[str, TreeAttention] = {"sdpa": tree_attention, "flex": flex_tree_attention}
"""trainer.attention."""


def implementation(form: str) -> str:
    """The name under which transformers knows a form."""
    return f"skylite_tree_{form}"


def register_forms() -> None:
    """Make them known to transformers."""
    for form, compute in FORMS.items():
        AttentionInterface.register(implementation(form), partial(attend, compute))


def attend(
    compute: TreeAttention,
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Called by the model's attention layers; an argument we do not know is an error, never ignored."""
    tree: TreeLayout = kwargs.pop("tree")
    scoring = Scoring(kwargs.pop("scaling"), kwargs.pop("sliding_window", None), kwargs.pop("softcap", None))
    unknown = [k for k, v in kwargs.items() if k not in HARMLESS and (isinstance(v, Tensor) or v)]
    if unknown or attention_mask is not None:
        raise TypeError(f"tree attention does not know {unknown or 'attention_mask'}")
    return compute(query, key, value, tree, scoring).contiguous(), None
