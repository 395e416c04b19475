"""LoRA on the weights of experts, computed beside the experts' own products.

PEFT adds B A to the weights of all experts of a layer before each pass, and its gradient has the size of
those weights: for 128 experts, 1.2 GB a layer. Here each token's experts get x A^T B^T, as a linear layer
does, in grouped products (torch's grouped_mm): one operation for all experts of a layer, one more for A and
one for B.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from peft.tuners.lora.layer import ParamWrapper
from torch import Tensor, nn
from torch.nn import functional
from transformers import PreTrainedModel

from skylite.adapters.experts import MODULE, PARAMETERS
from skylite.config.lora import LoraConfig
from skylite.errors import ModelError

ALIGNMENT = 8
"""On a GPU, rows of a grouped product's matrices begin at multiples of 16 bytes: 8 elements in bfloat16."""


def check_experts(model: PreTrainedModel, config: LoraConfig) -> None:
    """Raise ModelError if lora.target_parameters names experts that this file cannot compute."""
    for entry in config.target_parameters:
        names = [n for n, _ in model.named_parameters() if n == entry or n.endswith(f".{entry}")]
        for name in names:
            path, _, parameter = name.rpartition(".")
            experts = model.get_submodule(path)
            if parameter not in PARAMETERS or not getattr(experts, "has_gate", False):
                names = []
        if not names:
            raise ModelError(
                f"lora.target_parameters names {entry!r}, which is not a weight of {type(model).__name__}'s "
                "experts that can have LoRA.",
                "Train the other modules (lora.target_modules), or choose another model.",
            )


def group_expert_lora(model: nn.Module) -> None:
    """Make the experts of a PEFT model with one active LoRA adapter use `experts_with_lora`."""
    for path, module in list(model.named_modules()):
        is_outer = isinstance(module, ParamWrapper) and path.rpartition(".")[2] == MODULE
        if is_outer and "forward" not in vars(module):  # not yet, for an earlier adapter
            module.forward = _forward_of(module)


def _forward_of(down: Any) -> Callable[..., Tensor]:
    """PEFT nests the wrappers: `down` has that of gate_up_proj inside, which has the experts."""
    gate_up, peft_forward = down.base_layer, down.forward

    def forward(x: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        adapter = _active_adapter(down)
        if adapter is None:
            y: Tensor = peft_forward(x, top_k_index, top_k_weights)
            return y
        return experts_with_lora(
            down.get_base_layer(),
            _matrices(gate_up, adapter),
            _matrices(down, adapter),
            x,
            top_k_index,
            top_k_weights,
        )

    return forward


def _active_adapter(layer: Any) -> str | None:
    """The one adapter that the layer adds; None if there is none."""
    names = layer.active_adapters
    if layer.disable_adapters or layer.merged or len(names) != 1 or names[0] not in layer.lora_A:
        return None
    return str(names[0])


def _matrices(layer: Any, adapter: str) -> tuple[Tensor, Tensor, float]:
    """A [E, rank, in], B [E, out, rank] and the scale, from PEFT's matrices of all experts."""
    a, b, rank = layer.lora_A[adapter].weight, layer.lora_B[adapter].weight, layer.r[adapter]
    number = len(a) // rank
    stacked_b = b.view(len(b), rank, number).permute(2, 0, 1)
    return a.view(number, rank, -1), stacked_b, layer.scaling[adapter]


def experts_with_lora(
    experts: Any,
    gate_up: tuple[Tensor, Tensor, float],
    down: tuple[Tensor, Tensor, float],
    x: Tensor,
    top_k_index: Tensor,
    top_k_weights: Tensor,
) -> Tensor:
    """[T, hidden]: the sum of each token's experts with LoRA, times their weights.

    Args:
        experts: the base module, such as Qwen3MoeExperts.
        gate_up: A, B and scale, see `_matrices`.
        down: the same of the second product.
        x: [T, hidden]
        top_k_index: [T, k], the experts of each token.
        top_k_weights: [T, k]
    """
    k = top_k_index.shape[1]
    expert_ids, order = torch.sort(top_k_index.reshape(-1))
    counts = torch.bincount(expert_ids, minlength=len(gate_up[0]))
    ends = counts.cumsum(0).to(torch.int32)

    def product(rows: Tensor, name: str, lora: tuple[Tensor, Tensor, float]) -> Tensor:
        weight, (a, b, scale) = getattr(experts, name), lora
        weight = weight if experts.is_transposed else weight.transpose(1, 2)
        rows = rows.to(weight.dtype)
        shrunk = functional.grouped_mm(rows, _padded(a.to(rows.dtype)).transpose(1, 2), offs=ends)
        widened = _padded(b.to(rows.dtype).transpose(1, 2))
        y = functional.grouped_mm(rows, weight, offs=ends)
        y = y + scale * functional.grouped_mm(shrunk, widened, offs=ends)
        return y + getattr(experts, f"{name}_bias")[expert_ids] if experts.has_bias else y

    inner = experts._apply_gate(product(x[order // k], PARAMETERS[0], gate_up))
    y = product(inner, PARAMETERS[1], down) * top_k_weights.reshape(-1)[order, None]
    back = torch.empty_like(order)
    back[order] = torch.arange(len(order), device=order.device)
    return y[back].view(*top_k_index.shape, -1).sum(1).to(x.dtype)


def _padded(matrices: Tensor) -> Tensor:
    """[E, rank, n] with zero rows up to a multiple of ALIGNMENT."""
    rank = matrices.shape[1]
    return functional.pad(matrices, (0, 0, 0, -rank % ALIGNMENT)).contiguous()
