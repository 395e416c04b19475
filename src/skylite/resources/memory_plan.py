"""Memory budgets, fixed before anything starts: a KV cache of a set size, and a limit for each trainer rank.

Together they fit the GPU, so neither the order of the starts nor the restart of an engine matters. A run that
cannot fit is refused here.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from skylite.config.engine import CpuLora
from skylite.config.train import TrainConfig
from skylite.engine.tensor_parallel import check_divisible
from skylite.engine.vllm.start_engines import MAX_LORAS
from skylite.errors import ConfigError
from skylite.notes import Note, warning
from skylite.processes.gpus import Gpu, visible_gpus
from skylite.processes.hardware import available_memory
from skylite.resources.gpu_plan import Placement
from skylite.resources.memory_messages import (
    cpu_note,
    engine_note,
    engine_parts,
    gib,
    rank_note,
    rank_settings,
    trainer_parts,
)
from skylite.resources.model_sizes import model_sizes
from skylite.resources.predicted_memory import EngineMemory, TrainerMemory, engine_memory, trainer_memory
from skylite.resources.sharded_sizes import sizes_per_gpu

MARGIN = 1.1
"""A prediction is refused if it exceeds the memory by more than its own error."""
GPU_BLOCK_SIZE = 64
"""Tokens of an engine's largest KV cache block on GPUs."""
SHARE_STEPS = 10_000
"""An engine's share of a GPU is a multiple of 1 / SHARE_STEPS."""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryBudget:
    """What the engines and the trainer may use. None on a CPU, or if the size of a GPU is unknown."""

    kv_cache_bytes: int | None
    """Of each engine, on each of its GPUs."""
    engine_share: float | None
    """Share of its GPUs that an engine asks for when it starts."""
    trainer_bytes: int | None
    """What torch may allocate on a rank's GPU."""
    notes: list[Note]


def plan_memory(
    config: TrainConfig, model_path: Path, device: str, dtype: str, cpu_lora: CpuLora, placement: Placement
) -> MemoryBudget:
    """Predict and divide the memory. Raises ConfigError if the run cannot fit on its GPUs."""
    sizes = model_sizes(model_path, config.lora)
    if device == "cpu":
        trainer = trainer_memory(sizes, config, "cpu", dtype)
        engine = engine_memory(sizes, config, "cpu", dtype, max_loras=MAX_LORAS, cpu_lora=cpu_lora)
        return unlimited(cpu_note(config, trainer, engine, available_memory()))
    gpus = {gpu.index: gpu for gpu in visible_gpus()}
    trainer = trainer_memory(sizes, config, "cuda", dtype)
    check_divisible(model_path, config.engine.tensor_parallel)
    part = sizes_per_gpu(sizes, model_path, config.lora, config.engine.tensor_parallel)
    engine = engine_memory(part, config, "cuda", dtype, max_loras=MAX_LORAS, cpu_lora=cpu_lora)
    return divide_gpus(config, trainer, engine, placement, gpus)


def divide_gpus(
    config: TrainConfig,
    trainer: TrainerMemory,
    engine: EngineMemory,
    placement: Placement,
    gpus: dict[int, Gpu],
) -> MemoryBudget:
    """The smallest GPU of the engines fixes the KV cache, the fullest GPU of the ranks fixes their limit.

    The ranks divide what other processes leave free; gpu_plan.py has checked that the engines fit.
    """
    totals = {index: gpu.total_bytes for index, gpu in gpus.items() if gpu.total_bytes is not None}
    if not totals.keys() >= {*placement.engine_gpus, *placement.rank_gpus}:
        return unlimited(
            warning(
                "memory: nvidia-smi does not tell the size of a GPU, so engine and trainer may take more "
                "than it has"
            )
        )
    sizes = [totals[i] for i in placement.engine_gpus]
    kv_cache = kv_cache_bytes(config, engine, min(sizes))
    limits = [
        placement.free_bytes.get(i, totals[i])
        - placement.engine_gpus.count(i) * (engine.before_kv() + kv_cache)
        for i in placement.rank_gpus
    ]
    limit = min(limits)
    fullest = placement.rank_gpus[limits.index(limit)]
    require_trainer(config, trainer, limit, gpus[fullest], placement)
    beside = placement.engine_gpus.count(fullest)
    return MemoryBudget(
        kv_cache_bytes=kv_cache,
        engine_share=engine_share(engine, kv_cache, max(sizes)),
        trainer_bytes=limit - trainer.process,
        notes=[engine_note(config, engine, kv_cache), rank_note(config, trainer, limit, beside)],
    )


def unlimited(note: Note) -> MemoryBudget:
    """No budgets, for the reason in the note."""
    return MemoryBudget(kv_cache_bytes=None, engine_share=None, trainer_bytes=None, notes=[note])


def engine_share(engine: EngineMemory, kv_cache: int, largest: int) -> float:
    """The gpu-memory-utilization of an engine with a KV cache of a set size, rounded down.

    An engine refuses to start unless this share of the GPU is free, even if it does not use the share then.
    When it asks, it already holds a part of its `process` bytes. The largest GPU gives the smallest share.
    """
    asked = engine.before_kv() - engine.process + kv_cache
    return max(1, SHARE_STEPS * asked // largest) / SHARE_STEPS


def kv_cache_bytes(config: TrainConfig, engine: EngineMemory, total: int) -> int:
    """What remains of an engine's share, at most what max_num_seqs of the longest sequences fill.

    Raises ConfigError if one sequence does not fit, or if the size of a token is not known.
    """
    if not engine.kv_per_token:
        raise ConfigError(
            "The engine's KV cache cannot be predicted: the model has layers without an attention that "
            "skylite knows (k_proj; a fused projection with num_attention_heads in config.json; the latent "
            "attention of DeepSeek V2 and V3).",
            "Use another model, or train on the CPU.",
        )
    longest = config.max_sequence_tokens
    smallest = engine.kv_cache(longest, GPU_BLOCK_SIZE)
    share = config.engine.gpu_memory_utilization
    left = int(share * total) - engine.before_kv()
    if left < smallest:
        raise ConfigError(
            f"The engine does not fit: engine.gpu_memory_utilization={share:g} of {gib(total)} is "
            f"{gib(share * total)}; {engine_parts(engine)}, and one sequence of {longest} tokens needs a KV "
            f"cache of {gib(smallest)}.",
            "Raise engine.gpu_memory_utilization, lower rollout.max_completion_tokens, divide the model "
            "among more GPUs (engine.tensor_parallel), or use a smaller model.",
        )
    return min(left, engine.kv_cache(longest, GPU_BLOCK_SIZE, config.engine.max_num_seqs))


def require_trainer(
    config: TrainConfig, trainer: TrainerMemory, limit: int, gpu: Gpu, placement: Placement
) -> None:
    """Raise ConfigError if the trainer cannot compute its longest trajectory in `limit` bytes."""
    longest = config.max_sequence_tokens
    needed = trainer.total(longest)
    if needed > limit * MARGIN:
        beside = placement.engine_gpus.count(gpu.index)
        engines = f" beside {beside} engine(s)" if beside else ""
        others = placement.others.get(gpu.index)
        raise ConfigError(
            f"The trainer does not fit on GPU {gpu.index} ({gpu.name}){engines}: a trajectory of {longest} "
            f"tokens needs about {gib(needed)} ({trainer_parts(trainer, longest)}), "
            f"and {gib(limit)} are left{f'; {others}' if others else ''}.",
            f"Use {rank_settings(config, beside)}.",
        )
