"""Frozen weights that stay quantised in memory: each use computes their values, and no copy of them is kept.

A parameter of such a layer is a tensor of the right shape and dtype without elements of its own. An operation
that takes it gets the widened matrix. Autograd functions that save it (bf16_weights.py, lora_linear.py) save
the quantised parts, and widen them again in backward.

Buys memory: in FP8 a frozen matrix takes half of its bfloat16 bytes, in INT4 a quarter and its scales.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map_only
from transformers import PreTrainedModel

from skylite.errors import ModelError
from skylite.hub.quantised import Format, grouped
from skylite.model.bf16_weights import forward_of


class QuantisedWeight(Tensor):
    """A frozen matrix [O, I] of a compute dtype, stored as the parts of a Format."""

    _form: Format
    _parts: Mapping[str, Tensor]

    @staticmethod
    def __new__(cls, form: Format, parts: Mapping[str, Tensor], dtype: torch.dtype) -> QuantisedWeight:
        first = parts[form.parts[0]]
        weight: QuantisedWeight = Tensor._make_wrapper_subclass(
            cls, form.shape(first.shape), dtype=dtype, device=first.device
        )
        weight._form, weight._parts = form, parts
        return weight

    # Operations reach __torch_dispatch__ below; this hook above them would only cost time.
    __torch_function__ = torch._C._disabled_torch_function_impl  # type: ignore[assignment]

    @property
    def parts(self) -> list[Tensor]:
        """The tensors that are stored."""
        return list(self._parts.values())

    def widen(self) -> Tensor:
        """Its values, as a plain tensor."""
        return self._form.widen(self._parts, self.dtype)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls,
        func: Callable[..., Any],
        types: Iterable[type],
        args: tuple[Any, ...] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(args[0]._form, args[0]._parts, args[0].dtype)
        args, kwargs = tree_map_only(QuantisedWeight, QuantisedWeight.widen, (args, dict(kwargs or {})))
        return func(*args, **kwargs)


def fill_quantised(
    base: PreTrainedModel,
    form: Format,
    tensors: Iterable[tuple[str, Tensor]],
    dtype: torch.dtype,
    device: torch.device,
) -> None:
    """Give a model without weights those of a quantised checkpoint.

    Raises ModelError if a weight is missing, or if a quantised matrix is not that of a linear layer.
    """
    stored = dict(base.named_parameters(remove_duplicate=False)) | dict(base.named_buffers())
    for name, value in grouped(form, tensors):
        path, _, attribute = name.rpartition(".")
        if name not in stored:
            continue  # of layers that predict further tokens, for example
        module: Any = base.get_submodule(path)
        if isinstance(value, Tensor):
            if attribute in module._buffers:
                module._buffers[attribute] = value.to(module._buffers[attribute].dtype)
            else:
                setattr(module, attribute, _frozen(value.to(device, dtype)))
            continue
        if type(module) is not nn.Linear:
            raise ModelError(
                f"{path} is quantised, and it is a {type(module).__name__}, not a linear layer.",
                "Use the 16-bit model.",
            )
        parts = {part: tensor.to(device) for part, tensor in value.items()}
        setattr(module, attribute, _frozen(QuantisedWeight(form, parts, dtype)))
        vars(module)["forward"] = forward_of(module)
    base.tie_weights()
    if missing := sorted(name for name, param in base.named_parameters() if param.is_meta):
        raise ModelError(
            f"The folder lacks {len(missing)} weights of {type(base).__name__}: {', '.join(missing[:3])}.",
            "The download is incomplete; download it again.",
        )


def _frozen(tensor: Tensor) -> nn.Parameter:
    return nn.Parameter(tensor, requires_grad=False)
