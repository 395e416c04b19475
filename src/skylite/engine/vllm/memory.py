"""What vLLM reserves memory for, for resources/, which predicts it."""

from __future__ import annotations

from skylite.engine.vllm.models import packed_layers
from skylite.errors import ConfigError

__all__ = ["CPU_BATCHED_TOKENS", "CPU_BLOCK_SIZE", "MERGED_MEMORY", "packed_layers", "served_rank"]

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank (vllm/config/lora.py)."""
CPU_BLOCK_SIZE = 32
"""Tokens per KV cache block; vLLM's CPU default is 128. The samples of a prompt share full blocks only.

Buys time: with 128, sampling gives 24 % fewer tokens per second."""
CPU_BATCHED_TOKENS = 2048
"""Tokens per forward pass, vLLM's choice for CPU servers; raised to the longest sequence."""
MERGED_MEMORY = 3.0
"""Bytes that merged weights need per byte of a bfloat16 model's files.

They are a copy of the original weights and a float32 copy with the adapter added.
"""


def served_rank(rank: int) -> int:
    """The smallest --max-lora-rank that vLLM accepts and that holds `rank`. Raises ConfigError."""
    if rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"LoRA rank {rank} is above {LORA_RANKS[-1]}, the largest that vLLM serves.",
            "Use a smaller rank.",
        )
    return next(r for r in LORA_RANKS if r >= rank)
