"""Sizes read from the names and shapes of a model's tensors, for attention of every kind, by hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from skylite.adapters import target_modules
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.engine.model_sizes import ModelSizes, sizes_of
from skylite.engine.vllm.memory import engine_memory, slots_per_rank
from skylite.errors import ConfigError
from skylite.resources.gpu_memory_plan import kv_cache_bytes, trainer_memory

GIB = 2**30
Shapes = dict[str, tuple[int, ...]]


def stack(layers: int, layer: Shapes, prefix: str = "model.layers", first: int = 0) -> Shapes:
    """The same tensors in each layer; `self_attn.q_proj` is self_attn.q_proj.weight."""
    numbers = range(first, first + layers)
    return {f"{prefix}.{i}.{name}.weight": shape for i in numbers for name, shape in layer.items()}


def sizes(shapes: Shapes, config: Mapping[str, Any], adapted: set[str] | None = None) -> ModelSizes:
    tensors = {"model.embed_tokens.weight": (1000, 64)} | shapes
    return sizes_of(tensors, config, dict.fromkeys(adapted or (), 32))


def attention(hidden: int, heads: int, kv: int, size: int) -> Shapes:
    """q, k, v and o of one layer."""
    return {
        "self_attn.q_proj": (heads * size, hidden),
        "self_attn.k_proj": (kv * size, hidden),
        "self_attn.v_proj": (kv * size, hidden),
        "self_attn.o_proj": (hidden, heads * size),
    }


def test_a_fused_projection_is_divided_by_config_json() -> None:
    """Phi-3-medium: 40 heads and 10 key-value heads of 128. GPT-NeoX names no key-value heads."""
    shapes = stack(2, {"self_attn.qkv_proj": (7680, 5120), "self_attn.o_proj": (5120, 5120)})
    config = {"hidden_size": 5120, "num_attention_heads": 40, "num_key_value_heads": 10}
    found = sizes(shapes, config)
    assert (found.queries, found.keys, found.cached) == (5120, 1280, 2 * 2 * 1280)
    neox = stack(2, {"attention.query_key_value": (3 * 512, 512)}, "gpt_neox.layers")
    assert sizes(neox, {"hidden_size": 512, "num_attention_heads": 8}).cached == 2 * 2 * 512


def test_latent_attention_caches_one_vector() -> None:
    """DeepSeek-V2-Lite: a latent of 512 and a rotary part of 64."""
    layer: Shapes = {
        "self_attn.q_proj": (16 * 192, 2048),
        "self_attn.kv_a_proj_with_mqa": (576, 2048),
        "self_attn.kv_b_proj": (16 * 256, 512),
        "self_attn.o_proj": (2048, 16 * 128),
    }
    shapes = stack(3, layer)
    config = {"model_type": "deepseek_v2", "kv_lora_rank": 512, "qk_rope_head_dim": 64}
    assert sizes(shapes, config).cached == 3 * 576
    assert sizes(shapes, config | {"model_type": "minicpm3"}).cached is None


def test_only_layers_of_the_language_model_have_a_cache() -> None:
    """As in Gemma 3: a vision tower with layers of the same names."""
    text, config = attention(64, 4, 2, 16), {"text_config": {"num_hidden_layers": 2, "hidden_size": 64}}
    vision = stack(27, attention(1024, 16, 16, 64), "vision_tower.vision_model.encoder.layers")
    found = sizes(vision | stack(2, text, "language_model.model.layers"), config)
    assert (found.num_layers, found.queries, found.cached) == (2, 64, 2 * 2 * 32)
    assert found.parameters > 27 * 4 * 1024 * 1024, "but it has weights"


def test_layers_of_different_sizes_are_added() -> None:
    shapes = stack(1, attention(64, 4, 2, 16)) | stack(1, attention(64, 4, 4, 16), first=1)
    assert sizes(shapes, {}).cached == 2 * 32 + 2 * 64


@pytest.mark.parametrize(
    "layer",
    [
        {"mixer.in_proj": (256, 64)},
        {"self_attn.qkv_proj": (96, 64)},  # config.json names no heads
    ],
)
def test_a_cache_of_unknown_size_is_refused_in_words(layer: Shapes) -> None:
    found = sizes(stack(1, attention(64, 4, 2, 16)) | stack(1, layer, first=1), {})
    assert found.cached is None
    engine = engine_memory(found, TrainConfig(), "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    with pytest.raises(ConfigError, match=r"The engine's KV cache cannot be predicted: .* \(k_proj; a fused"):
        kv_cache_bytes(TrainConfig(), engine, 80 * GIB)


def test_a_part_of_a_packed_layer_has_the_slots_of_all_parts() -> None:
    shapes = stack(1, attention(64, 4, 2, 16))
    adapted = {f"model.layers.0.self_attn.{name}" for name in ("q_proj", "v_proj", "o_proj")}
    found = sizes(shapes, {"architectures": ["LlamaForCausalLM"]}, adapted)
    assert found.lora_per_rank == 128 + 96 + 128
    assert slots_per_rank(found, 1) == 128 + 96 + 96 + 128, "with k's"
    engine = engine_memory(found, TrainConfig(), "cuda", "bfloat16", max_loras=2, cpu_lora="dense")
    assert engine.lora_slots == 2 * 32 * slots_per_rank(found, 1) * 2
    assert slots_per_rank(sizes(shapes, {"architectures": ["Unknown"]}, adapted), 1) == found.lora_per_rank


def test_the_adapter_of_a_mixture_of_experts_is_small(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3-30B-A3B: 128 experts in each of 48 layers. The trainer adapts the attention."""
    layer = attention(2048, 32, 4, 128) | {"mlp.gate": (128, 2048)}
    for expert in range(128):
        layer |= {f"mlp.experts.{expert}.{name}": (768, 2048) for name in ("gate_proj", "up_proj")}
        layer[f"mlp.experts.{expert}.down_proj"] = (2048, 768)
    shapes = stack(48, layer)
    monkeypatch.setattr(target_modules, "text_shapes", lambda _: shapes)
    (tmp_path / "config.json").write_text("{}")
    adapted = target_modules.predict_modules(tmp_path, LoraConfig())[1]
    memory = trainer_memory(sizes(shapes, {}, adapted), TrainConfig(), "cuda", "bfloat16")
    assert memory.weights > 50 * GIB
    assert memory.adapter < GIB
