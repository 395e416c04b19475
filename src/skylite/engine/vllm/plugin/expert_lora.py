"""Mixtures of experts with LoRA on CPU: the base products and LoRA of the experts, in plain torch.

vLLM's own kernel for experts on CPU knows no LoRA, so with LoRA, even on other layers alone, vLLM 0.32 takes
a Triton kernel and fails. vLLM loads and stores the adapters of experts; only their products are here. Only
vLLM's processes import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.activation import MoEActivation, apply_moe_activation
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend

from skylite.engine.vllm.plugin.lora_math import add_lora

_INSTALLED = "skylite_experts"


class ExpertsWithLora(LoRAExpertsMixin, CPUUnquantizedExperts):  # type: ignore[misc]  # vLLM is untyped
    """Each expert's tokens one expert after the other, with the adapter of each token."""

    def process_weights_after_loading(self, layer: torch.nn.Module) -> None:
        """Keep the weights as the files have them: [E, 2 inner, hidden] and [E, hidden, inner]."""

    def apply(
        self,
        output: torch.Tensor,
        hidden_states: torch.Tensor,
        w1: torch.Tensor,
        w2: torch.Tensor,
        topk_weights: torch.Tensor,
        topk_ids: torch.Tensor,
        activation: MoEActivation,
        *args: Any,
        apply_router_weight_on_input: bool = False,
        **kwargs: Any,
    ) -> None:
        """output [T, hidden] = the sum of each token's experts, times their weights [T, k]."""
        output.zero_()
        for expert in torch.unique(topk_ids).tolist():
            rows, places = torch.where(topk_ids == expert)
            x = hidden_states[rows]
            lora = None if self._lora_context is None else _ExpertLora(self._lora_context, expert, rows)
            both = functional.linear(x, w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
            if lora is not None:
                lora.add_gate_and_up(both, x)
            inner = both.new_empty(len(rows), both.shape[1] // 2)
            apply_moe_activation(activation, inner, both)
            y = functional.linear(inner, w2[expert], None if self.w2_bias is None else self.w2_bias[expert])
            if lora is not None:
                lora.add_down(y, inner)
            if not apply_router_weight_on_input:
                y = y * topk_weights[rows, places, None]
            output.index_add_(0, rows, y.to(output.dtype))


class _ExpertLora:
    """LoRA of one expert for the tokens in `rows`."""

    def __init__(self, context: MoELoRAContext, expert: int, rows: torch.Tensor) -> None:
        self._context, self._expert = context, expert
        self._groups = context.punica_wrapper.groups_of(rows)

    def add_gate_and_up(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y [N, 2 inner] += LoRA of x [N, hidden]."""
        self._add(y, x, self._context.w13_lora_a_stacked, self._context.w13_lora_b_stacked)

    def add_down(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y [N, hidden] += LoRA of x [N, inner]."""
        self._add(y, x, self._context.w2_lora_a_stacked, self._context.w2_lora_b_stacked)

    def _add(
        self, y: torch.Tensor, x: torch.Tensor, a: Sequence[torch.Tensor], b: Sequence[torch.Tensor]
    ) -> None:
        start, only = 0, slice(self._expert, self._expert + 1)
        for part_a, part_b in zip(a, b, strict=True):  # each [slots, E, rank, in] or [slots, E, out, rank]
            part = y.narrow(1, start, part_b.shape[2])
            add_lora(part, x, part_a[:, only], part_b[:, only], self._groups)
            start += part_b.shape[2]


def install() -> None:
    """Make vLLM compute experts by ExpertsWithLora where LoRA is on. Safe to call again."""
    if getattr(FusedMoEWithLoRA, _INSTALLED, False):
        return
    setattr(FusedMoEWithLoRA, _INSTALLED, True)
    select = method.select_unquantized_moe_backend

    def select_with_lora(moe_config: Any) -> Any:
        if moe_config.is_lora_enabled:
            return UnquantizedMoeBackend.CPU, ExpertsWithLora
        return select(moe_config)

    method.select_unquantized_moe_backend = select_with_lora
