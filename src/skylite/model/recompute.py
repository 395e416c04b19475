"""Tensors that cost little to make again, so that a backward pass which wants them need not find them kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

RecomputeFn = Callable[[], Tensor]
_ATTRIBUTE = "_skylite_recompute_fn"


def with_recompute_fn(made: Tensor, recompute_fn: RecomputeFn) -> Tensor:
    """`made`, with how to make it again written on it. Only this very object carries it: no view, no copy, nothing computed from it."""
    setattr(made, _ATTRIBUTE, (recompute_fn, made._version))
    return made


def recompute_fn_of(x: Tensor) -> RecomputeFn | None:
    """How to make x again; None where nobody said, or x was changed since."""
    recompute_fn, version = getattr(x, _ATTRIBUTE, (None, 0))
    return recompute_fn if x._version == version else None
