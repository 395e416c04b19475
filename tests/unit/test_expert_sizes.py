"""The sizes of mixtures of experts, by hand. tests/fake_gpu/cases.py compares the bytes with a fake GPU's."""

from __future__ import annotations

from typing import Any

import pytest

from skylite.config.train import TrainConfig
from skylite.engine.model_sizes import Experts, experts_of, sizes_of
from skylite.engine.vllm.memory import engine_memory
from skylite.resources.gpu_memory_plan import trainer_memory
from tests.unit.test_model_sizes import attention, stack

HIDDEN, INNER, COUNT, PER_TOKEN = 32, 24, 6, 2
CONFIG = {"num_experts_per_tok": PER_TOKEN}
Shapes = dict[str, tuple[int, ...]]


def separate(gate: str, down: str, up: str) -> Shapes:
    """A file with a matrix for each expert."""
    layer: Shapes = {"mlp.gate.weight": (COUNT, HIDDEN)}
    for index in range(COUNT):
        layer |= {f"mlp.experts.{index}.{name}.weight": (INNER, HIDDEN) for name in (gate, up)}
        layer[f"mlp.experts.{index}.{down}.weight"] = (HIDDEN, INNER)
    return layer


@pytest.mark.parametrize(
    "layer",
    [
        separate("gate_proj", "down_proj", "up_proj"),
        separate("w1", "w2", "w3"),
        {"mlp.experts.gate_up_proj": (COUNT, 2 * INNER, HIDDEN)},
        {"experts.gate_up_proj": (COUNT, HIDDEN, 2 * INNER)},
    ],
    ids=["Qwen", "Mixtral", "fused", "fused and transposed"],
)
def test_experts_are_found_in_files_of_every_form(layer: Shapes) -> None:
    found = experts_of(layer, CONFIG, HIDDEN)
    assert found == Experts(COUNT, PER_TOKEN, INNER)
    assert experts_of(layer, {}, HIDDEN).per_token == COUNT, "all, if config.json does not tell"


def test_shared_experts_are_an_ordinary_mlp() -> None:
    shared = {"mlp.shared_experts.gate_proj.weight": (40, HIDDEN), "mlp.gate_proj.weight": (50, HIDDEN)}
    assert experts_of(shared, CONFIG, HIDDEN) == Experts()


def test_a_layer_keeps_what_its_experts_keep() -> None:
    """A layer without norms: q, k, v and attention's output, its normalizers, and the experts'."""
    layer: dict[str, Any] = attention(HIDDEN, 4, 2, 8)
    tensors = {"model.embed_tokens.weight": (1000, HIDDEN)} | stack(2, layer)
    for index in range(2):
        tensors |= {f"model.layers.{index}.{name}": s for name, s in separate("w1", "w2", "w3").items()}
    found = sizes_of(tensors, CONFIG, {})
    experts = PER_TOKEN * (3 * INNER + HIDDEN + 1)
    assert found.kept == 2 * (2 * 32 + 16 + 16 + experts)
    assert found.recomputed == 2 * HIDDEN, "one norm's output: experts and router are frozen"
    assert found.kept_float32 == 2 * (32 // 64 + COUNT + 8 * PER_TOKEN)
    assert (found.intermediate, found.experts_per_token, found.expert_intermediate) == (0, PER_TOKEN, INNER)

    work = trainer_memory(found, TrainConfig(), "cuda", "bfloat16").work
    assert work == 2 * PER_TOKEN * (7 * INNER - HIDDEN)
    engine = engine_memory(found, TrainConfig(), "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    logits = 128 * 1000 * 4 * 3
    buffers = PER_TOKEN * (32 + 48)  # TritonExperts.workspace_shapes: max(I, H), max(2 I, H)
    assert engine.activations == 8192 * (4 * HIDDEN + buffers) * 2 + logits
