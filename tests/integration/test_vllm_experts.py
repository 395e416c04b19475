"""Experts with LoRA on a CPU, in a batch of the base and two adapters, against a loop over tokens."""

from __future__ import annotations

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


def test_each_token_gets_its_experts_with_its_own_adapter(plugin: Any) -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from skylite.engine.vllm.plugin.lora_math import group_rows

    torch.manual_seed(0)
    w1, w2 = random(EXPERTS, 2 * INNER, HIDDEN), random(EXPERTS, HIDDEN, INNER)
    gate_a, up_a = random(SLOTS, EXPERTS, RANK, HIDDEN), random(SLOTS, EXPERTS, RANK, HIDDEN)
    gate_b, up_b = random(SLOTS, EXPERTS, INNER, RANK), random(SLOTS, EXPERTS, INNER, RANK)
    down_a, down_b = random(SLOTS, EXPERTS, RANK, INNER), random(SLOTS, EXPERTS, HIDDEN, RANK)
    slots = torch.tensor(TOKEN_SLOTS)
    experts = plugin.ExpertsWithLora.__new__(plugin.ExpertsWithLora)
    experts.quant_config = SimpleNamespace(w1_bias=None, w2_bias=None)
    experts.set_lora_context(
        SimpleNamespace(
            w13_lora_a_stacked=(gate_a, up_a),
            w13_lora_b_stacked=(gate_b, up_b),
            w2_lora_a_stacked=(down_a,),
            w2_lora_b_stacked=(down_b,),
            punica_wrapper=SimpleNamespace(groups_of=lambda rows: group_rows(slots[rows].tolist())),
        )
    )
    x, scores = random(len(TOKEN_SLOTS), HIDDEN), torch.rand(len(TOKEN_SLOTS), EXPERTS)
    weights, ids = scores.topk(TOP_K)
    output = torch.full_like(x, torch.nan)
    experts.apply(output, x, w1, w2, weights, ids, MoEActivation.SILU, EXPERTS, None)

    for token, slot in enumerate(TOKEN_SLOTS):
        expected = torch.zeros(HIDDEN)
        for weight, e in zip(weights[token], ids[token].tolist(), strict=True):
            gate, up, down = w1[e, :INNER], w1[e, INNER:], w2[e]
            if slot >= 0:
                gate = gate + gate_b[slot, e] @ gate_a[slot, e]
                up = up + up_b[slot, e] @ up_a[slot, e]
                down = down + down_b[slot, e] @ down_a[slot, e]
            expected += weight * (down @ (functional.silu(gate @ x[token]) * (up @ x[token])))
        torch.testing.assert_close(output[token], expected, rtol=1e-5, atol=1e-6)
