"""What one GPU of a tensor-parallel engine holds, by hand."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import load_config
from skylite.processes.gpus import Gpu
from skylite.resources.gpu_plan import Placement
from skylite.resources.memory_plan import divide_gpus
from skylite.resources.model_sizes import model_sizes, sizes_of
from skylite.resources.predicted_memory import (
    ENGINE_PROCESS,
    TENSOR_PARALLEL_BUFFERS,
    engine_memory,
    trainer_memory,
)
from skylite.resources.sharded_sizes import divided_sizes, sizes_per_gpu
from tests.unit.doc_scripts import script
from tests.unit.test_memory_plan import HIDDEN, INNER, KEYS, LAYERS, RANK, VOCAB, config, model

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
    found = sizes_per_gpu(model_sizes(folder, settings.lora), folder, settings.lora, gpus)
    queries, inner = HIDDEN // gpus, INNER // gpus
    layer = 2 * queries * HIDDEN + 2 * keys * HIDDEN + 3 * inner * HIDDEN + 2 * HIDDEN
    # vLLM pads 500 rows of the embedding to 512.
    assert found.parameters == 512 // gpus * HIDDEN + HIDDEN + LAYERS * layer
    # A of q, k, v, gate and up is complete, and so is B of o and down.
    slots = (HIDDEN + queries) + 2 * (HIDDEN + keys) + (queries + HIDDEN)
    slots += 2 * (HIDDEN + inner) + (inner + HIDDEN)
    assert found.slots_per_rank == LAYERS * slots
    assert found.cached == LAYERS * 2 * keys

    engine = engine_memory(found, settings, "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    assert engine.weights == 2 * found.parameters
    assert engine.lora_slots == 2 * 2 * 8 * LAYERS * slots, "vLLM rounds rank 4 up to 8"
    assert engine.kv_per_token == 2 * 2 * keys * LAYERS
    logits = 128 * VOCAB * 4 * 3
    assert engine.activations == 8192 * (2 * inner + 4 * HIDDEN) * 2 + logits, "logits are gathered"
    assert engine.process == ENGINE_PROCESS["cuda"] + TENSOR_PARALLEL_BUFFERS


def test_one_gpu_holds_all(tmp_path: Path) -> None:
    folder = headed(tmp_path / "m")
    sizes = model_sizes(folder, config().lora)
    assert sizes_per_gpu(sizes, folder, config().lora, 1) is sizes


def parts(shapes: Shapes, tree: dict[str, Any], adapted: set[str]) -> tuple[int, int, Any]:
    """Elements, slots and cache of each of 4 GPUs, without the embedding."""
    tensors = {"model.embed_tokens.weight": (64, 16)} | shapes
    found = divided_sizes(sizes_of(tensors, tree, adapted, RANK), tensors, tree, adapted, 4)
    return found.parameters - 16 * 16, found.slots_per_rank, found.cached


def test_a_fused_projection_is_divided_by_heads() -> None:
    """Phi-3: 8 heads and 2 key-value heads of 4, so each of 4 GPUs has 2 heads and one key-value head."""
    tree = {"num_attention_heads": 8, "hidden_size": 32, "num_key_value_heads": 2, "head_dim": 4}
    shapes: Shapes = {"model.layers.0.self_attn.qkv_proj.weight": (48, 32)}
    adapted = {"model.layers.0.self_attn.qkv_proj"}
    assert parts(shapes, tree, adapted) == ((8 + 4 + 4) * 32, 32 + 8 + 4 + 4, 2 * 4)


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
    adapted = {f"{layer}kv_a_proj_with_mqa", f"{layer}kv_b_proj"}
    weights = 12 * 32 + 20 * 32 + 16 * 16 + 32 * 8
    assert parts(shapes, tree, adapted) == (weights, (20 + 32) + (16 + 16), 20)


def test_experts_are_divided_and_routers_and_other_towers_are_not() -> None:
    layer = "model.layers.0."
    shapes = {
        f"{layer}self_attn.k_proj.weight": (8, 16),
        f"{layer}self_attn.k_proj.bias": (8,),
        f"{layer}self_attn.q_proj.weight": (16, 16),
        f"{layer}mlp.gate.weight": (6, 16),
        f"{layer}mlp.experts.5.down_proj.weight": (16, 12),
        f"{layer}mlp.experts.gate_up_proj": (6, 16, 24),
        f"{layer}mlp.unknown.weight": (16, 10),
        "visual.blocks.0.fc1.weight": (12, 16),
        "lm_head.weight": (64, 16),
    }
    tree = {"num_attention_heads": 4}  # and 2 key-value heads, by the shapes
    weights = 4 * 16 + 4 + 4 * 16 + 6 * 16 + 16 * 3 + 6 * 16 * 6 + 160 + 192 + 16 * 16
    assert parts(shapes, tree, set())[0] == weights
    unknown = parts(shapes, {}, {f"{layer}mlp.unknown", "lm_head"})
    assert unknown[0] == weights + 4 * 16 + 4, "keys are on every GPU if the heads are not known"
    assert unknown[1] == (16 + 10) + (64 + 16), "embeddings have complete slots"


def test_the_documented_72b_fits_eight_gpus_of_80_gb(tmp_path: Path) -> None:
    """The command and the sums in docs/how-to/gpus.md."""
    fit = script("generate_gpu_fit")
    model = fit.write_shapes(tmp_path, "72B")
    page = Path(fit.PAGE).read_text(encoding="utf-8")
    command = next(line for line in page.replace("\\\n", "").splitlines() if "Qwen2.5-72B-Instruct" in line)
    recipe = Path(fit.PAGE).parents[2] / "recipes" / "gsm8k.toml"
    settings = load_config(recipe, {}, re.findall(r"--set (\S+)", command))
    sizes = model_sizes(model, settings.lora)
    trainer = trainer_memory(sizes, settings, "cuda", "bfloat16")
    size = settings.engine.tensor_parallel
    part = sizes_per_gpu(sizes, model, settings.lora, size)
    engine = engine_memory(part, settings, "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    gpus = {i: Gpu(i, f"GPU-{i}", "any", 9.0, fit.GPUS["80 GB"] << 20, "", False) for i in range(8)}
    ranks = list(range(settings.trainer.num_ranks))
    placement = Placement(rank_gpus=ranks, engine_gpus=list(range(len(ranks), len(ranks) + size)), notes=[])
    notes = [*map(str, divide_gpus(settings, trainer, engine, placement, gpus).notes)]
    found = [re.search(r"(?:GPUs: |about )(\S+) GiB", note) for note in notes]
    sums = [match[1] for match in found if match]
    assert f"{sums[0]} GiB on each GPU of the engine, and\n{sums[1]} GiB on each of the trainer" in page
