"""Float32 arithmetic where autocast or bfloat16 weights would round."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

EMBEDDINGS = {functional.embedding, torch.embedding}
PRODUCTS = {
    functional.conv1d,
    functional.linear,
    functional.scaled_dot_product_attention,
    torch.addmm,
    torch.baddbmm,
    torch.bmm,
    torch.einsum,
    torch.matmul,
    torch.mm,
    Tensor.__matmul__,
    Tensor.__rmatmul__,
    Tensor.addmm,
    Tensor.addmm_,
    Tensor.bmm,
    Tensor.matmul,
    Tensor.mm,
    *filter(None, [getattr(torch, "_grouped_mm", None), getattr(functional, "grouped_mm", None)]),
}
"""Functions that refuse a float32 and a bfloat16 argument together. All others promote to float32."""


class Float32Arithmetic(TorchFunctionMode):
    """Inside, a model with bfloat16 weights computes in float32: its weights are widened where they are used.

    Needs memory for one widened matrix at a time. Use it without autocast, and only for forward passes.
    """

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        if func in EMBEDDINGS:
            return _widened(func(*args, **kwargs))
        if func is Tensor.to and torch.bfloat16 in args[1:]:  # as recurrent layers do before a convolution
            args = (args[0], *(torch.float32 if arg is torch.bfloat16 else arg for arg in args[1:]))
        if func in PRODUCTS:
            args, kwargs = _widened(args), {name: _widened(value) for name, value in kwargs.items()}
        return func(*args, **kwargs)


def row_dot(a: Tensor, b: Tensor) -> Tensor:
    """Dot products over the last dimension, in the dtype of `a` and `b`.

    Autocast would compute torch.linalg.vecdot in bfloat16, in forward but not in backward.
    """
    with torch.autocast(a.device.type, enabled=False):
        products: Tensor = torch.linalg.vecdot(a, b)
    return products


def _widened(value: Any) -> Any:
    # torch's tree_map takes ten times as long, and a forward pass has hundreds of products.
    if isinstance(value, (list, tuple)):
        return tuple(map(_widened, value))
    return value.float() if isinstance(value, Tensor) and value.dtype == torch.bfloat16 else value
