"""What vLLM reserves memory for, as VllmLauncher.memory predicts it."""

from __future__ import annotations

import math

from skylite.adapters.experts import expert_layers
from skylite.config.engine import CpuLora
from skylite.config.train import TrainConfig
from skylite.engine.interface import EngineMemory
from skylite.engine.model_sizes import ModelSizes
from skylite.engine.vllm.models import packed_layers
from skylite.errors import ConfigError
from skylite.processes.hardware import DTYPE_BYTES

LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Values that vLLM accepts for --max-lora-rank (vllm/config/lora.py)."""
CPU_BLOCK_SIZE = 32
"""Tokens per KV cache block; vLLM's CPU default is 128. The samples of a prompt share full blocks only.

Buys time: with 128, sampling gives 24 % fewer tokens per second."""
GPU_BLOCK_SIZE = 64
"""Tokens of the largest KV cache block on GPUs."""
CPU_BATCHED_TOKENS = 2048
"""Tokens per forward pass, vLLM's choice for CPU servers; raised to the longest sequence."""
GPU_BATCHED_TOKENS = 8192
MERGED_MEMORY = 3.0
"""Bytes that merged weights need per byte of a bfloat16 model's files.

They are a copy of the original weights and a float32 copy with the adapter added.
"""
PROCESS = {"cpu": 5 << 28, "cuda": 2 << 30}
"""CPU: an engine's processes, which share their imports. GPU: with CUDA graphs; an estimate, not measured."""
TENSOR_PARALLEL_BUFFERS = 1 << 30
"""More of the process with several GPUs: NCCL and an all-reduce; an estimate, not measured."""
LOGIT_BYTES = 3 * 4
"""float32 copies of the logits while vLLM samples."""
DIVIDED_INPUTS = ("o_proj", "down_proj", "fc2", "w2", "dense", "dense_4h_to_h", "out_proj", "c_proj")
"""Layers whose inputs several GPUs divide; they divide the outputs of the others."""


def served_rank(rank: int) -> int:
    """The smallest --max-lora-rank that vLLM accepts and that holds `rank`. Raises ConfigError."""
    if rank > LORA_RANKS[-1]:
        raise ConfigError(
            f"LoRA rank {rank} is above {LORA_RANKS[-1]}, the largest that vLLM serves.",
            "Use a smaller rank.",
        )
    return next(r for r in LORA_RANKS if r >= rank)


def engine_memory(
    sizes: ModelSizes, config: TrainConfig, device: str, dtype: str, *, max_loras: int, cpu_lora: CpuLora
) -> EngineMemory:
    """Predict an engine's memory, on each of its GPUs."""
    item, gpus = DTYPE_BYTES[dtype], config.engine.tensor_parallel
    tokens = CPU_BATCHED_TOKENS if device == "cpu" else GPU_BATCHED_TOKENS
    part = sizes.per_gpu(gpus)
    inner, hidden = part.expert_intermediate, part.hidden
    # The two buffers of experts (TritonExperts.workspace_shapes).
    experts = part.experts_per_token * (max(inner, hidden) + max(2 * inner, hidden))
    logits = config.engine.max_num_seqs * part.vocabulary * LOGIT_BYTES
    merged = MERGED_MEMORY * DTYPE_BYTES["bfloat16"] if device == "cpu" and cpu_lora == "merged" else 0
    return EngineMemory(
        weights=part.weight_bytes(item) + int(part.parameters * merged),
        lora_slots=max_loras * served_rank(config.lora.max_rank) * slots_per_rank(sizes, gpus) * item,
        activations=tokens * (2 * part.intermediate + 4 * hidden + experts) * item + logits,
        process=PROCESS[device] + (TENSOR_PARALLEL_BUFFERS if gpus > 1 else 0),
        kv_per_token=(part.cached or 0) * item,
        block_size=CPU_BLOCK_SIZE if device == "cpu" else GPU_BLOCK_SIZE,
    )


def slots_per_rank(sizes: ModelSizes, gpus: int) -> int:
    """Elements of an adapter of rank 1 on each GPU: vLLM gives each part of a packed layer its slots."""
    packed, modules = packed_layers(sizes.config), set(sizes.adapted)
    for path in sizes.adapted:
        parent, _, name = path.rpartition(".")
        siblings = {f"{parent}.{other}" for parts in packed if name in parts for other in parts}
        modules |= {sibling for sibling in siblings if f"{sibling}.weight" in sizes.shapes}
    experts = {p: e for p, e in expert_layers(sizes.shapes).items() if p in modules}
    slots = {path: sizes.shapes[f"{path}.weight"] for path in modules - experts.keys()}
    divided = sum(shape[path.rpartition(".")[2] in DIVIDED_INPUTS] for path, shape in slots.items())
    # Several GPUs divide the inner size of experts; each has its own matrices of the hidden size.
    in_experts = sum(e._replace(inner=math.ceil(e.inner / gpus)).slots_per_rank for e in experts.values())
    return sum(map(sum, slots.values())) - divided + math.ceil(divided / gpus) + in_experts
