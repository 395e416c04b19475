"""Tensors that cost little to make again, so that a backward pass which wants them need not find them kept."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

Recipe = Callable[[], Tensor]
_ATTRIBUTE = "_skylite_recipe"


def with_recipe(made: Tensor, recipe: Recipe) -> Tensor:
    """`made`, with how to make it again written on it. Only this very object carries it: no view, no copy, nothing computed from it."""
    setattr(made, _ATTRIBUTE, (recipe, made._version))
    return made


def recipe_of(x: Tensor) -> Recipe | None:
    """How to make x again; None where nobody said, or x was changed since."""
    recipe, version = getattr(x, _ATTRIBUTE, (None, 0))
    return recipe if x._version == version else None
