"""The predicted bytes of vLLM's LoRA slots are those that vLLM's own layers allocate."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.resources.gpu_memory_plan import engine_memory
from skylite.resources.model_sizes import model_sizes
from tests.tiny_models import make_tiny_model

pytestmark = pytest.mark.vllm
MAX_LORAS = 3
ALL = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


@pytest.mark.parametrize(
    ("family", "modules", "rank"),
    [("llama", ALL, 4), ("llama", ["q_proj", "o_proj"], 16), ("qwen3", ALL, 8), ("gemma3", ["up_proj"], 8)],
    ids=["rank 4 in slots of 8", "a part of a packed layer", "qwen3", "gemma3, half of a packed MLP"],
)
def test_vllm_allocates_the_predicted_bytes(
    family: str, modules: list[str], rank: int, tmp_path: Path
) -> None:
    model = make_tiny_model(tmp_path / "model", family)
    lora = LoraConfig(rank=rank, target_modules=modules)
    config, sizes = TrainConfig(lora=lora), model_sizes(model, lora)
    predicted = engine_memory(sizes, config, "cpu", "bfloat16", max_loras=MAX_LORAS, cpu_lora="dense")
    numbers = [str(MAX_LORAS), str(lora.vllm_rank)]
    command = [sys.executable, "-m", "tests.integration.vllm_lora_slots", str(model), *numbers, *modules]
    done = subprocess.run(command, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert int(done.stdout.splitlines()[-1]) == predicted.lora_slots
