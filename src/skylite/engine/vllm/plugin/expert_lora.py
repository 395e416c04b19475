"""Mixtures of experts with LoRA on CPU: routing, the base products and LoRA of the experts, in plain torch.

vLLM's own kernel for experts on CPU knows no LoRA, so with LoRA, even on other layers alone, vLLM 0.32 takes
a Triton kernel and fails. Its router on CPU leaves out what only groups of experts have there: sigmoids, a
bias for the choice, a factor. vLLM loads and stores the adapters of experts; only their products are here.
Only vLLM's processes import this.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch.nn import functional
from vllm.lora.layers.fused_moe import FusedMoEWithLoRA
from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method as method
from vllm.model_executor.layers.fused_moe.activation import (
    ApplyMoEActivationConfig,
    MoEActivation,
    apply_moe_activation,
)
from vllm.model_executor.layers.fused_moe.experts.cpu_moe import CPUUnquantizedExperts
from vllm.model_executor.layers.fused_moe.experts.lora_context import MoELoRAContext
from vllm.model_executor.layers.fused_moe.experts.lora_experts_mixin import LoRAExpertsMixin
from vllm.model_executor.layers.fused_moe.oracle.unquantized import UnquantizedMoeBackend
from vllm.model_executor.layers.fused_moe.router.cpu_router import CPURouter

from skylite.engine.vllm.plugin.lora_math import add_lora

_INSTALLED = "skylite_experts"
GPT_OSS = ApplyMoEActivationConfig(clamp_limit=7.0, alpha=1.702, beta=1.0)
"""vLLM's fixed settings of MoEActivation.SWIGLUOAI."""


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
        config = ApplyMoEActivationConfig.from_configs(self.moe_config, self.quant_config)
        for expert in torch.unique(topk_ids).tolist():
            rows, places = torch.where(topk_ids == expert)
            x = hidden_states[rows]
            lora = None if self._lora_context is None else _ExpertLora(self._lora_context, expert, rows)
            both = functional.linear(x, w1[expert], None if self.w1_bias is None else self.w1_bias[expert])
            if lora is not None:
                lora.add_gate_and_up(both, x, in_turn=activation == MoEActivation.SWIGLUOAI)
            inner = activated(both, activation, config)
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

    def add_gate_and_up(self, y: torch.Tensor, x: torch.Tensor, *, in_turn: bool) -> None:
        """y [N, 2 inner], or [N, inner] without a gate, += LoRA of x [N, hidden].

        in_turn: y has gate and up in turn, not one after the other.
        """
        a, b = self._context.w13_lora_a_stacked, self._context.w13_lora_b_stacked
        parts = (y[:, ::2], y[:, 1::2]) if in_turn else torch.split(y, [part.shape[2] for part in b], dim=1)
        self._add(parts, x, a, b)

    def add_down(self, y: torch.Tensor, x: torch.Tensor) -> None:
        """y [N, hidden] += LoRA of x [N, inner]."""
        self._add([y], x, self._context.w2_lora_a_stacked, self._context.w2_lora_b_stacked)

    def _add(
        self,
        parts: Sequence[torch.Tensor],
        x: torch.Tensor,
        a: Sequence[torch.Tensor],
        b: Sequence[torch.Tensor],
    ) -> None:
        only = slice(self._expert, self._expert + 1)
        for y, part_a, part_b in zip(parts, a, b, strict=True):  # [slots, E, rank, in], [slots, E, out, rank]
            add_lora(y, x, part_a[:, only], part_b[:, only], self._groups)


def activated(x: torch.Tensor, kind: MoEActivation, config: ApplyMoEActivationConfig) -> torch.Tensor:
    """The activation of x [N, 2 inner], or [N, inner] without a gate -> [N, inner].

    vLLM's CPU build lacks those that clamp.
    """
    if kind == MoEActivation.SWIGLUOAI:  # gate and up in turn
        return _clamped_swiglu(x[:, ::2], x[:, 1::2], GPT_OSS)
    if kind in (MoEActivation.SILU, MoEActivation.SWIGLUOAI_UNINTERLEAVE) and config.clamp_limit is not None:
        gate, up = x.chunk(2, dim=1)
        return _clamped_swiglu(gate, up, config)
    inner = x.new_empty(len(x), x.shape[1] // 2 if kind.is_gated else x.shape[1])
    apply_moe_activation(kind, inner, x, activation_config=config)
    return inner


def _clamped_swiglu(gate: torch.Tensor, up: torch.Tensor, config: ApplyMoEActivationConfig) -> torch.Tensor:
    limit = config.clamp_limit
    gate = gate.clamp(max=limit)
    y: torch.Tensor = gate * torch.sigmoid(config.alpha * gate) * (up.clamp(-limit, limit) + config.beta)
    return y


def choose_experts(
    router: Any, hidden_states: torch.Tensor, logits: torch.Tensor, *args: Any, **kwargs: Any
) -> tuple[torch.Tensor, torch.Tensor]:
    """CPURouter's weights [T, k] and ids [T, k] of experts, from the router's logits [T, E].

    In float32, as transformers and vLLM on GPUs compute them.
    """
    if router.custom_routing_function is not None or router.scoring_func not in ("softmax", "sigmoid"):
        stock: tuple[torch.Tensor, torch.Tensor] = _stock_choice(
            router, hidden_states, logits, *args, **kwargs
        )
        return stock
    logits = logits.float()
    scores = logits.softmax(-1) if router.scoring_func == "softmax" else logits.sigmoid()
    bias = router.e_score_correction_bias
    ranked = scores if bias is None else scores + bias
    if router.use_grouped_topk and (router.num_expert_group or 1) > 1:
        ranked = _in_best_groups(ranked, router.num_expert_group, router.topk_group, 1 if bias is None else 2)
    ids = ranked.topk(router.top_k, dim=-1)[1]
    weights = scores.gather(1, ids)
    if router.renormalize:
        weights = weights / weights.sum(-1, keepdim=True)
    return weights * router.routed_scaling_factor, ids.to(torch.int32)


def _in_best_groups(scores: torch.Tensor, groups: int, best: int, members: int) -> torch.Tensor:
    """scores [T, E], with -inf outside the `best` groups by the sum of their `members` highest scores."""
    grouped = scores.view(len(scores), groups, -1)
    chosen = grouped.topk(members, dim=-1)[0].sum(-1).topk(best, dim=-1)[1]
    outside = torch.ones_like(grouped[..., 0], dtype=torch.bool).scatter_(1, chosen, False)
    return grouped.masked_fill(outside[..., None], float("-inf")).view_as(scores)


_stock_choice = CPURouter._compute_routing


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
    CPURouter._compute_routing = choose_experts
