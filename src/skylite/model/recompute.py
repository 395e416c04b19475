"""Lets a tensor carry a function that recomputes it, so that backward need not keep the tensor."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

RecomputeFn = Callable[[], Tensor]
_ATTRIBUTE = "_skylite_recompute_fn"


def with_recompute_fn(tensor: Tensor, recompute_fn: RecomputeFn) -> Tensor:
    """`tensor` itself, with `recompute_fn` attached. Views and copies do not inherit it."""
    setattr(tensor, _ATTRIBUTE, (recompute_fn, tensor._version))
    return tensor


def recompute_fn_of(tensor: Tensor) -> RecomputeFn | None:
    """The attached function; None if there is none or the tensor was changed in place since."""
    recompute_fn, version = getattr(tensor, _ATTRIBUTE, (None, 0))
    return recompute_fn if tensor._version == version else None
