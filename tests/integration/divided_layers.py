"""vLLM's layers on rank 0 of several GPUs: prints elements of weights, and of LoRA slots at rank 1, as JSON.

python -m tests.integration.divided_layers GPUS
"""

from __future__ import annotations

import json
import sys
from contextlib import ExitStack
from types import ModuleType
from typing import Any
from unittest import mock

HIDDEN, HEADS, KEY_VALUE_HEADS, HEAD_SIZE, INNER, VOCABULARY = 64, 8, 4, 8, 192, 500
LORA_RANK, SLOTS = 8, 2


def divided(modules: list[ModuleType], gpus: int) -> ExitStack:
    """Let vLLM's layers believe that they are on the first of `gpus` GPUs."""
    stack = ExitStack()
    for module in modules:
        for name, value in (("world_size", gpus), ("rank", 0)):
            function = f"get_tensor_model_parallel_{name}"
            stack.enter_context(mock.patch.object(module, function, lambda value=value: value))
    return stack


def measure(gpus: int) -> dict[str, int]:
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.config.lora import LoRAConfig
    from vllm.lora import layers as lora
    from vllm.model_executor import parameter
    from vllm.model_executor.layers import linear, vocab_parallel_embedding

    config = LoRAConfig(max_lora_rank=LORA_RANK, max_loras=SLOTS, lora_dtype=torch.bfloat16)
    with (
        set_current_vllm_config(VllmConfig()),
        divided([linear, parameter, vocab_parallel_embedding], gpus),
    ):
        queries = HEADS * HEAD_SIZE
        layers: list[tuple[Any, Any]] = [
            (
                linear.QKVParallelLinear(HIDDEN, HEAD_SIZE, HEADS, KEY_VALUE_HEADS, bias=False),
                lora.MergedQKVParallelLinearWithLoRA,
            ),
            (linear.RowParallelLinear(queries, HIDDEN, bias=False), lora.RowParallelLinearWithLoRA),
            (
                linear.MergedColumnParallelLinear(HIDDEN, [INNER, INNER], bias=False),
                lora.MergedColumnParallelLinearWithLoRA,
            ),
            (linear.RowParallelLinear(INNER, HIDDEN, bias=False), lora.RowParallelLinearWithLoRA),
        ]
        slots = 0
        for layer, wrapper in layers:
            wrapped = wrapper(layer)
            wrapped.create_lora_weights(SLOTS, config)
            slots += sum(t.numel() for t in (*wrapped.lora_a_stacked, *wrapped.lora_b_stacked))
        embedding = vocab_parallel_embedding.VocabParallelEmbedding(VOCABULARY, HIDDEN)
    return {
        "layer": sum(layer.weight.numel() for layer, _ in layers),
        "embedding": embedding.weight.numel(),
        "slots": slots // (SLOTS * LORA_RANK),
    }


if __name__ == "__main__":
    print(json.dumps(measure(int(sys.argv[1]))))
