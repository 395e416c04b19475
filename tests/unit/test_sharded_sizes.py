"""What one GPU of a tensor-parallel engine holds, by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skylite.engine.model_sizes import model_sizes, sizes_of
from skylite.engine.vllm.memory import PROCESS, TENSOR_PARALLEL_BUFFERS, engine_memory, slots_per_rank
from skylite.processes.gpus import Gpu
from skylite.resources.gpu_memory_plan import divide_gpus, trainer_memory
from skylite.resources.gpu_placement import GpuChoice
from skylite.rollout.plan import device_defaults
from tests.settings import load_config
from tests.unit.doc_scripts import script
from tests.unit.test_gpu_memory_plan import HIDDEN, INNER, KEYS, LAYERS, VOCAB, config, model

Shapes = dict[str, tuple[int, ...]]
HEADS = {"num_attention_heads": 8, "num_key_value_heads": 4}
"""Of test_memory_plan's model: heads of 8 elements."""


def headed(folder: Path, factor: int = 1, **changes: Any) -> Path:
    """test_memory_plan's model with the heads in its config.json."""
    path = model(folder, factor) / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | HEADS | changes))
    return folder


@pytest.mark.parametrize(("gpus", "keys"), [(2, KEYS // 2), (4, KEYS // 4), (8, KEYS // 4)])
def test_each_gpu_holds_its_part(tmp_path: Path, gpus: int, keys: int) -> None:
    """With 8 GPUs, each of the 4 key-value heads is on two."""
    folder, settings = headed(tmp_path / "m"), config(engine={"tensor_parallel": gpus})
    sizes = model_sizes(folder, settings.lora)
    part = sizes.per_gpu(gpus)
    assert part.parameters == -(-sizes.parameters // gpus)
    # A of q, k, v, gate and up is complete, and so is B of o and down.
    complete = HIDDEN * (1 + 2 + 1 + 2 + 1)
    assert slots_per_rank(sizes, gpus) == LAYERS * (complete + (2 * HIDDEN + 2 * KEYS + 3 * INNER) // gpus)
    assert part.cached == LAYERS * 2 * keys

    engine = engine_memory(sizes, settings, "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    assert engine.weights == 2 * part.parameters
    assert engine.lora_slots == 2 * 2 * 8 * slots_per_rank(sizes, gpus), "vLLM rounds rank 4 up to 8"
    assert engine.kv_per_token == 2 * 2 * keys * LAYERS
    logits = 128 * VOCAB * 4 * 3
    assert engine.activations == 8192 * (2 * INNER // gpus + 4 * HIDDEN) * 2 + logits, "logits are gathered"
    assert engine.process == PROCESS["cuda"] + TENSOR_PARALLEL_BUFFERS


def test_one_gpu_holds_all(tmp_path: Path) -> None:
    sizes = model_sizes(headed(tmp_path / "m"), config().lora)
    assert sizes.per_gpu(1) == sizes


def test_latent_attention_caches_its_vector_on_every_gpu() -> None:
    tree = {
        "model_type": "deepseek_v2", "num_attention_heads": 4, "kv_lora_rank": 16, "qk_rope_head_dim": 4
    }  # fmt: skip
    layer = "model.layers.0.self_attn."
    shapes: Shapes = {
        f"{layer}q_proj.weight": (4 * 12, 32),
        f"{layer}kv_a_proj_with_mqa.weight": (20, 32),
        f"{layer}kv_b_proj.weight": (4 * 16, 16),
        f"{layer}o_proj.weight": (32, 4 * 8),
    }
    assert sizes_of(shapes, tree, {}).per_gpu(4).cached == 20


def test_the_documented_72b_fits_eight_gpus_of_80_gb(tmp_path: Path) -> None:
    """The command and the sums in docs/how-to/gpus.md."""
    fit = script("generate_gpu_fit")
    model = fit.write_shapes(tmp_path, "72B")
    page = Path(fit.PAGE).read_text(encoding="utf-8")
    command = next(line for line in page.replace("\\\n", "").splitlines() if "Qwen2.5-72B-Instruct" in line)
    recipe = Path(fit.PAGE).parents[2] / "recipes" / "gsm8k.toml"
    settings, _ = device_defaults(load_config(recipe, {}, re.findall(r"--set (\S+)", command)), "cuda")
    sizes = model_sizes(model, settings.lora)
    trainer = trainer_memory(sizes, settings, "cuda", "bfloat16")
    size = settings.engine.tensor_parallel
    engine = engine_memory(sizes, settings, "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    gpus = {i: Gpu(i, f"GPU-{i}", "any", 9.0, 81_559 << 20, "", False) for i in range(8)}
    ranks = list(range(settings.trainer.num_ranks))
    engines = list(range(len(ranks), len(ranks) + size))
    placement = GpuChoice(rank_gpus=ranks, engine_gpus=engines, notes=[], gpus=gpus)
    notes = [*map(str, divide_gpus(settings, trainer, engine, placement)[1])]
    found = [re.search(r"(?:GPUs: |about )(\S+) GiB", note) for note in notes]
    sums = [match[1] for match in found if match]
    said = f"{sums[0]} GiB on each GPU of the engine, and {sums[1]} GiB on each of the trainer"
    assert said in " ".join(page.split())
