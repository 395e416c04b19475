"""Wrong ways to compute a model over a prefix tree. fast_path_check.py must reject each."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import pytest
import torch

from skylite.model import attention_backends, fast_path_check, tree_attention
from skylite.model.fused_ops import RMS_NORM_GAINS, fuse_norms
from skylite.model.packing import pack_tokens
from skylite.model.policy import Policy

Change = Callable[..., Any]


@contextmanager
def _attention(change: Change) -> Iterator[None]:
    """`change(query, key, value, layout, settings)` gives other arguments to the tree attention."""
    right = tree_attention.tree_attention

    def wrong(*args: Any) -> torch.Tensor:
        return right(*change(*args))

    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(attention_backends.BACKENDS, "sdpa", wrong)
        attention_backends.register_backends()
        yield
    attention_backends.register_backends()


@contextmanager
def _packing(change: Change) -> Iterator[None]:
    """`change(tokens)` gives other packed tokens to a tree pass."""

    def wrong(*args: Any) -> Any:
        tokens = pack_tokens(*args)
        return change(tokens) if args[1] == "tree" else tokens

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fast_path_check, "pack_tokens", wrong)
        yield


@contextmanager
def _mask_off_by_one() -> Iterator[None]:
    """Each token gets the mask of its successor, so it sees one token of the future."""
    right = tree_attention._make_masks

    def wrong(*args: Any) -> list[torch.Tensor]:
        return [torch.roll(mask, -1, dims=0) for mask in right(*args)]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tree_attention, "_make_masks", wrong)
        yield


def _wrong_scale(query: Any, key: Any, value: Any, layout: Any, settings: Any) -> Any:
    return query, key, value, layout, replace(settings, scaling=settings.scaling * 1.1)


def _swapped_heads(query: Any, key: Any, value: Any, layout: Any, settings: Any) -> Any:
    return query.roll(1, dims=1), key, value, layout, settings


def _shifted_positions(tokens: Any) -> Any:
    """The tokens after the first four are one position further."""
    positions = tokens.inputs["position_ids"]
    return replace(tokens, inputs=tokens.inputs | {"position_ids": positions + (positions >= 4)})


WRONG: dict[str, Callable[[], Any]] = {
    "mask off by one": _mask_off_by_one,
    "wrong scale": lambda: _attention(_wrong_scale),
    "swapped heads": lambda: _attention(_swapped_heads),
    "shifted positions": lambda: _packing(_shifted_positions),
}


def tree_gap(policy: Policy, probe: list[int]) -> float:
    """Mean |logprob difference| between tree and plain form, as enable_shortcuts computes it."""
    base = policy.model.get_base_model()
    base.set_attn_implementation("eager")
    reference = fast_path_check._probe_logprobs(replace(policy, packing="padded"), probe)
    base.set_attn_implementation(attention_backends.IMPLEMENTATIONS["sdpa"])
    return fast_path_check._gap(replace(policy, packing="tree"), probe, reference)[0]


def wrong_norm_gap(policy: Policy, probe: list[int]) -> float:
    """The same of padded rows whose norms multiply by the other family's gain (missing or extra offset)."""
    base = policy.model.get_base_model()
    base.set_attn_implementation("eager")
    policy = replace(policy, packing="padded")
    reference = fast_path_check._probe_logprobs(policy, probe)
    gaps = []
    for offset in RMS_NORM_GAINS.values():
        undo = fuse_norms(policy.model, offset, False)
        assert undo is not None
        gaps.append(fast_path_check._gap(policy, probe, reference)[0])
        undo()
    return max(gaps)
