"""The vLLM server of `eval` and `serve`: one adapter, or the base."""

from __future__ import annotations

import logging
from pathlib import Path

from skylite.adapters.folder import ServedAdapter
from skylite.config.lora import served_rank
from skylite.config.train import TrainConfig
from skylite.engine.served_models import check_build, check_lora
from skylite.engine.server_command import EngineSpec, choose_cpu_lora
from skylite.processes.gpus import visible_gpus
from skylite.processes.hardware import choose_device, choose_dtype

logger = logging.getLogger(__name__)


def single_engine_spec(
    config: TrainConfig, adapter: ServedAdapter | None, model_path: Path, uds: Path
) -> EngineSpec:
    """An engine for this adapter only; without one, for the base with LoRA disabled. Raises SkyliteError."""
    device = choose_device()
    check_build(device)
    if adapter is not None and (note := check_lora(model_path, device)):
        logger.info(note)
    dtype = choose_dtype(config.model.dtype, device)[0]
    return EngineSpec(
        name="vllm",
        model_path=model_path,
        device=device,
        dtype=dtype,
        uds=uds,
        max_lora_rank=served_rank(adapter.rank if adapter is not None else 1),
        target_modules=adapter.target_modules if adapter is not None else None,
        max_loras=1,
        max_cpu_loras=2,
        max_model_len=config.max_sequence_tokens,
        max_num_seqs=config.engine.max_num_seqs,
        kv_cache_gib=config.engine.kv_cache_gib,
        gpu_memory_utilization=config.engine.gpu_memory_utilization,
        cpu_lora=choose_cpu_lora(config.engine.cpu_lora, dtype, model_path),
        enable_lora=adapter is not None,
        seed=config.seed,
        gpus=tuple(g.index for g in visible_gpus()[:1]) if device == "cuda" else (),
    )
