"""The share of a GPU that vLLM asks for is free although the trainer holds all that it may."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from typing import Any

import pytest

from skylite.config.resolved import MemoryPlan
from skylite.config.train import TrainConfig
from skylite.engine.interface import EngineMemory
from skylite.engine.model_sizes import model_sizes
from skylite.engine.vllm.memory import engine_memory
from skylite.processes.gpus import Gpu
from skylite.resources.gpu_memory_plan import TrainerMemory, divide_gpus, trainer_memory
from skylite.resources.gpu_placement import GpuChoice
from tests.unit.doc_scripts import script

MIB = 2**20
CONTEXT = 500 * MIB
"""What an engine's process holds before it asks: a CUDA context. It is part of its `process` bytes."""


def predict(folder: Path, shape: str, config: TrainConfig) -> tuple[TrainerMemory, EngineMemory]:
    sizes = model_sizes(script("generate_gpu_fit").write_shapes(folder, shape), config.lora)
    engine = engine_memory(sizes, config, "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    return trainer_memory(sizes, config, "cuda", "bfloat16"), engine


def divide(
    config: TrainConfig, trainer: TrainerMemory, engine: EngineMemory, mib: list[int], engines: list[int]
) -> MemoryPlan:
    gpus = {i: Gpu(i, f"GPU-{i}", "any", 9.0, size * MIB, "", False) for i, size in enumerate(mib)}
    choice = GpuChoice(rank_gpus=[0], engine_gpus=engines, notes=[], gpus=gpus)
    return divide_gpus(config, trainer, engine, choice)[0]


def settings(**engine: Any) -> TrainConfig:
    return TrainConfig.model_validate({"trainer": {"checkpointing": "full"}, "engine": engine})


@pytest.mark.parametrize(
    ("shape", "share", "engines", "mib"),
    [
        *itertools.product(["0.5B"], [0.45], [1, 2], [24_564, 46_068, 81_559, 143_771]),
        *itertools.product(["1.5B"], [0.3], [1, 2], [24_564, 46_068, 81_559, 143_771]),
        *itertools.product(["7B"], [0.45], [1, 2], [81_559, 143_771]),
    ],
)
def test_an_engine_starts_beside_a_trainer_that_has_grown(
    tmp_path: Path, shape: str, share: float, engines: int, mib: int
) -> None:
    config = settings(gpu_memory_utilization=share, num_engines=engines)
    trainer, engine = predict(tmp_path, shape, config)
    total = mib * MIB
    budget = divide(config, trainer, engine, [mib], [0] * engines)
    assert budget.engine_share is not None
    assert budget.kv_cache_bytes is not None
    assert budget.trainer_bytes is not None
    # All that the others may hold when the last engine asks: vLLM compares as in v1/worker/utils.py.
    others = budget.trainer_bytes + trainer.process
    others += (engines - 1) * (engine.before_kv() + budget.kv_cache_bytes)
    assert math.ceil(budget.engine_share * total) <= total - others - CONTEXT
    held = engine.before_kv() - engine.process + budget.kv_cache_bytes
    assert held - total / 10_000 <= budget.engine_share * total <= held, "no less than what it will hold"


def test_the_share_fits_the_largest_gpu_of_the_engines(tmp_path: Path) -> None:
    """The cache has one size for all, so a large GPU gives less of itself."""
    config = settings(num_engines=2)
    trainer, engine = predict(tmp_path, "0.5B", config)
    budget = divide(config, trainer, engine, [143_771, 24_564], [1, 0])
    assert budget.engine_share is not None
    assert budget.kv_cache_bytes is not None
    assert budget.engine_share * 143_771 * MIB <= engine.before_kv() - engine.process + budget.kv_cache_bytes
