"""Experts with LoRA on a CPU, in a batch of the base and two adapters, against a loop over tokens."""

from __future__ import annotations

import math
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.nn import functional

pytestmark = pytest.mark.vllm
EXPERTS, HIDDEN, INNER, RANK, SLOTS, TOP_K = 4, 6, 32, 2, 2, 2
TOKEN_SLOTS = [0, -1, 1, 1, 0, -1, 1]


@pytest.fixture
def plugin() -> Any:
    """The module under test; vLLM's kernels are loaded first, as in its own processes."""
    from vllm.platforms import current_platform

    current_platform.import_kernels()
    from skylite.engine.vllm.plugin import expert_lora

    return expert_lora


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape) / 2


def clamped(gate: torch.Tensor, up: torch.Tensor, limit: float, alpha: float, beta: float) -> torch.Tensor:
    """gpt-oss' activation, and with alpha 1 and beta 0 a SiLU with a limit."""
    gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
    return (up + beta) * gate / (1 + (-alpha * gate).exp())


ACTIVATIONS: dict[str, tuple[str, float | None, Callable[[torch.Tensor, torch.Tensor], torch.Tensor]]] = {
    "silu": ("SILU", None, lambda gate, up: functional.silu(gate) * up),
    "gpt-oss": ("SWIGLUOAI", None, lambda gate, up: clamped(gate, up, 7.0, 1.702, 1.0)),
    "silu with a limit": ("SILU", 0.3, lambda gate, up: clamped(gate, up, 0.3, 1.0, 0.0)),
    "no gate": ("RELU2_NO_MUL", None, lambda gate, up: functional.relu(gate).square()),
}
"""vLLM's name, a limit in the model's config, and the formula."""


@pytest.mark.parametrize("name", ACTIVATIONS)
def test_each_token_gets_its_experts_with_its_own_adapter(name: str, plugin: Any) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from skylite.engine.vllm.plugin.lora_math import group_rows

    kind, limit, formula = ACTIVATIONS[name]
    in_turn, gated = kind == "SWIGLUOAI", not kind.endswith("NO_MUL")
    torch.manual_seed(0)
    gates, ups = (random(EXPERTS, INNER, HIDDEN) * 3 for _ in range(2))
    w2 = random(EXPERTS, HIDDEN, INNER)
    biases = [random(EXPERTS, n) if in_turn else torch.zeros(EXPERTS, n) for n in (INNER, INNER, HIDDEN)]
    gate_a, up_a = random(SLOTS, EXPERTS, RANK, HIDDEN), random(SLOTS, EXPERTS, RANK, HIDDEN)
    gate_b, up_b = random(SLOTS, EXPERTS, INNER, RANK), random(SLOTS, EXPERTS, INNER, RANK)
    down_a, down_b = random(SLOTS, EXPERTS, RANK, INNER), random(SLOTS, EXPERTS, HIDDEN, RANK)
    slots = torch.tensor(TOKEN_SLOTS)

    def joined(gate: torch.Tensor, up: torch.Tensor) -> torch.Tensor:
        """As vLLM stores the two: one after the other, or gpt-oss' in turn."""
        if not gated:
            return gate
        return torch.stack([gate, up], dim=2).flatten(1, 2) if in_turn else torch.cat([gate, up], dim=1)

    experts = plugin.ExpertsWithLora.__new__(plugin.ExpertsWithLora)
    none = {"gemm1_clamp_limit": None, "gemm1_alpha": None, "gemm1_beta": None}
    experts.quant_config = SimpleNamespace(w1_bias=joined(*biases[:2]), w2_bias=biases[2], **none)
    experts.moe_config = SimpleNamespace(
        swiglu_limit=limit, swiglu_alpha=None, swiglu_beta=None, activation_situ_beta=None,
        activation_situ_linear_beta=None,
    )  # fmt: skip
    experts.set_lora_context(
        SimpleNamespace(
            w13_lora_a_stacked=(gate_a, up_a) if gated else (gate_a,),
            w13_lora_b_stacked=(gate_b, up_b) if gated else (gate_b,),
            w2_lora_a_stacked=(down_a,),
            w2_lora_b_stacked=(down_b,),
            punica_wrapper=SimpleNamespace(groups_of=lambda rows: group_rows(slots[rows].tolist())),
        )
    )
    x, scores = random(len(TOKEN_SLOTS), HIDDEN), torch.rand(len(TOKEN_SLOTS), EXPERTS)
    weights, ids = scores.topk(TOP_K)
    output = torch.full_like(x, torch.nan)
    activation = MoEActivation[kind]
    experts.apply(output, x, joined(gates, ups), w2, weights, ids, activation, EXPERTS, None)

    for token, slot in enumerate(TOKEN_SLOTS):
        expected = torch.zeros(HIDDEN)
        for weight, e in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = gates[e], ups[e], w2[e]
            if slot >= 0:
                gate = gate + gate_b[slot, e] @ gate_a[slot, e]
                up = up + up_b[slot, e] @ up_a[slot, e]
                down = down + down_b[slot, e] @ down_a[slot, e]
            inner = formula(gate @ x[token] + biases[0][e], up @ x[token] + biases[1][e])
            expected += weight * (down @ inner + biases[2][e])
        torch.testing.assert_close(output[token], expected, rtol=1e-5, atol=1e-5)


def by_hand(logits: list[float], router: Any) -> dict[int, float]:
    """Expert -> weight of one token."""
    total = sum(map(math.exp, logits))
    is_softmax = router.scoring_func == "softmax"
    scores = [math.exp(x) / total if is_softmax else 1 / (1 + math.exp(-x)) for x in logits]
    bias = [0.0] * len(logits) if router.e_score_correction_bias is None else router.e_score_correction_bias
    ranked = {e: score + float(bias[e]) for e, score in enumerate(scores)}
    if router.use_grouped_topk:
        size = len(logits) // router.num_expert_group
        members = 1 if router.e_score_correction_bias is None else 2
        worth = {g: sum(sorted((ranked[e] for e in range(g * size, g * size + size)), reverse=True)[:members])
                 for g in range(router.num_expert_group)}  # fmt: skip
        best = sorted(worth, key=worth.__getitem__, reverse=True)[: router.topk_group]
        ranked = {e: value for e, value in ranked.items() if e // size in best}
    chosen = sorted(ranked, key=ranked.__getitem__, reverse=True)[: router.top_k]
    norm = sum(scores[e] for e in chosen) if router.renormalize else 1.0
    return {e: scores[e] / norm * router.routed_scaling_factor for e in chosen}


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("groups", [None, 4])
@pytest.mark.parametrize("biased", [False, True])
def test_experts_are_chosen_and_weighted_by_the_models_rule(
    scoring: str, groups: int | None, biased: bool, plugin: Any
) -> None:
    """vLLM's own router on a CPU takes sigmoids, biases and factors only with groups."""
    torch.manual_seed(0)
    router = SimpleNamespace(
        scoring_func=scoring, top_k=3, renormalize=biased, routed_scaling_factor=2.5,
        use_grouped_topk=groups is not None, num_expert_group=groups, topk_group=2,
        e_score_correction_bias=torch.randn(16) if biased else None, custom_routing_function=None,
    )  # fmt: skip
    logits = torch.randn(20, 16)
    weights, ids = plugin.choose_experts(router, torch.zeros(20, 4), logits, None)
    for token in range(20):
        found = dict(zip(ids[token].tolist(), weights[token].tolist(), strict=True))
        assert found == pytest.approx(by_hand(logits[token].tolist(), router), rel=1e-5)
