"""The sizes that a run's memory depends on, from the headers of the weight files and config.json."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.adapters.target_modules import predict_modules
from skylite.config.lora import LoraConfig
from skylite.engine.tensor_parallel import text_section
from skylite.engine.vllm.servable_models import packed_layers
from skylite.hub.resolve import tensor_shapes
from skylite.resources.expert_sizes import Experts, experts_of, outside_experts
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

Shapes = Mapping[str, Sequence[int]]
OTHER_TOWERS = ("vision", "visual", "image", "audio", "mm_")
"""In the names of layers that see no text tokens."""
FUSED_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
LATENT_CACHE = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe")
"""Model types for which the engine caches one latent vector per token and layer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What memory depends on. Counts of elements."""

    parameters: int
    largest_layer: int
    outside_layers: int
    """Embeddings, head, last norm, and towers that see no text tokens."""
    vocabulary: int
    hidden: int
    intermediate: int
    """Inner size of the largest MLP, without experts."""
    experts_per_token: int
    """0 without experts."""
    expert_intermediate: int
    """Inner size of one expert."""
    expert_work: int
    """Elements per token that the backward pass of one layer's experts holds."""
    num_layers: int
    lora: int
    """Parameters of an adapter of the run's rank."""
    lora_per_rank: int
    """The same of rank 1."""
    slots_per_rank: int
    """The same with all parts of a layer that the engine packs: it gives each part its slots."""
    kept: int
    """Elements per token that a forward pass keeps over all layers, if norms and activations are recomputed
    (trainer.checkpointing=selective)."""
    recomputed: int
    """Elements per token that checkpointing=none keeps in addition."""
    kept_float32: int
    """float32 elements per token: scales of norms, normalizers of attention."""
    queries: int
    """Elements per token of one layer's queries."""
    keys: int
    cached: int | None
    """Elements per token of the engine's KV cache, over all layers. None: not known."""


@dataclass(frozen=True, slots=True)
class Attention:
    """Elements per token of one layer."""

    queries: int
    keys: int
    values: int
    cached: int | None


@dataclass(frozen=True, slots=True)
class Kept:
    """Elements per token of one layer, see ModelSizes."""

    kept: int
    recomputed: int
    float32: int


def model_sizes(model_path: Path, lora: LoraConfig) -> ModelSizes:
    """The sizes of a model folder. Raises ModelError for a damaged file."""
    config = parse_json(read_text(model_path / "config.json"))
    return sizes_of(tensor_shapes(model_path), config, predict_modules(model_path, lora)[1], lora.rank)


def cached_per_token(model_path: Path) -> int | None:
    """Numbers that the KV cache holds for a token; None: not known. Raises ModelError for a damaged file."""
    config = parse_json(read_text(model_path / "config.json"))
    return sizes_of(tensor_shapes(model_path), config, (), 0).cached


def sizes_of(shapes: Shapes, config: Mapping[str, Any], adapted: Collection[str], rank: int) -> ModelSizes:
    """The sizes of a model with these tensors and this config.json, and LoRA on the modules `adapted`."""
    layers = text_layers(shapes)
    vocabulary, hidden = next((s for n, s in shapes.items() if "embed" in n and len(s) == 2), (1, 1))
    section = text_section(config)
    attentions = [attention_of(layer, section) for layer in layers.values()]
    experts = [experts_of(layer, section, hidden) for layer in layers.values()]
    per_rank = _lora_elements(shapes, adapted)
    kept = [
        _kept(outside_experts(layer), attention, routed, hidden, rank * _count(prefix, layer, adapted))
        for (prefix, layer), attention, routed in zip(layers.items(), attentions, experts, strict=True)
    ]
    cached = [a.cached for a in attentions]
    return ModelSizes(
        parameters=_elements(shapes),
        largest_layer=max(map(_elements, layers.values()), default=0),
        outside_layers=_elements(shapes) - sum(map(_elements, layers.values())),
        vocabulary=vocabulary,
        hidden=hidden,
        intermediate=max((_mlp(outside_experts(layer)) for layer in layers.values()), default=0),
        experts_per_token=max((e.per_token for e in experts), default=0),
        expert_intermediate=max((e.inner for e in experts), default=0),
        expert_work=max((e.work(hidden) for e in experts), default=0),
        num_layers=len(layers),
        lora=rank * per_rank,
        lora_per_rank=per_rank,
        slots_per_rank=_lora_elements(shapes, with_packed(shapes, adapted, packed_layers(config))),
        kept=sum(k.kept for k in kept),
        recomputed=sum(k.recomputed for k in kept),
        kept_float32=sum(k.float32 for k in kept),
        queries=max((a.queries for a in attentions), default=0),
        keys=max((a.keys for a in attentions), default=0),
        cached=None if None in cached or not cached else sum(c or 0 for c in cached),
    )


def text_layers(shapes: Shapes) -> dict[str, dict[str, Sequence[int]]]:
    """The language model's layers by prefix (`model.layers.3.`): their tensors, named below it."""
    stacks: dict[str, dict[str, dict[str, Sequence[int]]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None and not any(tower in name for tower in OTHER_TOWERS):
            prefix, rest = ".".join(parts[: number + 1]) + ".", ".".join(parts[number + 1 :])
            stacks.setdefault(".".join(parts[:number]), {}).setdefault(prefix, {})[rest] = shape
    return max(stacks.values(), key=lambda layers: sum(map(_elements, layers.values())), default={})


def attention_of(layer: Shapes, config: Mapping[str, Any]) -> Attention:
    """From the layer's own matrices. config.json tells what these do not show."""
    outputs = _output(layer, "o_proj"), _input(layer, "o_proj")
    latent, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if latent and _output(layer, "kv_a_proj_with_mqa"):
        queries = _output(layer, "q_b_proj", "q_proj")
        known = config.get("model_type") in LATENT_CACHE and rope and "index_head_dim" not in config
        return Attention(queries, queries, outputs[1], latent + rope if known else None)
    if keys := _output(layer, "k_proj"):
        values = _output(layer, "v_proj") or keys
        return Attention(_output(layer, "q_proj"), keys, values, keys + values)
    fused, queries = _output(layer, *FUSED_QKV), _query_size(config)
    keys = (fused - queries) // 2
    if not fused or not queries or keys <= 0:
        return Attention(queries, 0, 0, None)
    return Attention(queries, keys, keys, 2 * keys)


def _query_size(config: Mapping[str, Any]) -> int:
    """Heads times head size; 0 if config.json does not tell."""
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    return int(heads * (config.get("head_dim") or hidden // heads)) if heads else 0


def _kept(layer: Shapes, attention: Attention, experts: Experts, hidden: int, shrunk: int) -> Kept:
    """What the backward pass of one layer needs.

    model/fused_ops.py, lora_linear.py and tree_attention.py save: each norm's input and scale, queries, keys,
    values and attention's output, gate and up, and x A^T of each LoRA layer. Experts and their router are
    frozen, so they need no input of theirs.
    """
    queries, keys = attention.queries, attention.keys
    gate, up = _output(layer, "gate_proj"), _output(layer, "up_proj")
    gate, up = (gate, up) if gate else (_output(layer, "gate_up_proj") // 2,) * 2
    norms = [name for name, shape in layer.items() if len(shape) == 1 and "norm" in name]
    head_norms = {"q_norm": queries, "k_norm": keys}
    norm_inputs = sum(
        next((size for mark, size in head_norms.items() if mark in name), hidden) for name in norms
    )
    head_size = next((shape[0] for name, shape in layer.items() if "q_norm" in name), 64)
    kept = norm_inputs + 2 * queries + keys + attention.values + gate + up + shrunk
    recomputed = (1 if experts.count and not gate else 2) * hidden + gate
    float32 = len(norms) + queries // head_size
    return Kept(kept + experts.kept(hidden), recomputed, float32 + experts.kept_float32())


def _mlp(layer: Shapes) -> int:
    return _output(layer, "gate_proj", "up_proj", "fc1", "w1", "dense_h_to_4h") or (
        _output(layer, "gate_up_proj") // 2
    )


def _lora_elements(shapes: Shapes, adapted: Collection[str]) -> int:
    """Of A and B at rank 1."""
    return sum(sum(shape) for name, shape in shapes.items() if name.removesuffix(".weight") in adapted)


def with_packed(shapes: Shapes, adapted: Iterable[str], packed: Sequence[Sequence[str]]) -> set[str]:
    """The adapted modules, and those that the engine packs with one of them."""
    found = set(adapted)
    for path in adapted:
        parent, _, name = path.rpartition(".")
        siblings = {f"{parent}.{other}" for parts in packed if name in parts for other in parts}
        found |= {sibling for sibling in siblings if f"{sibling}.weight" in shapes}
    return found


def _count(prefix: str, layer: Shapes, adapted: Collection[str]) -> int:
    """Number of the layer's modules with LoRA."""
    return sum(1 for name in layer if f"{prefix}{name}".removesuffix(".weight") in adapted)


def _output(layer: Shapes, *names: str) -> int:
    """Output size of the first linear layer that has one of these names; 0 if there is none."""
    return next((shape[0] for shape in _matrices(layer, *names)), 0)


def _input(layer: Shapes, *names: str) -> int:
    return next((shape[1] for shape in _matrices(layer, *names)), 0)


def _matrices(layer: Shapes, *names: str) -> Iterable[Sequence[int]]:
    return (
        shape
        for name in names
        for key, shape in layer.items()
        if f".{key}".endswith(f".{name}.weight") and len(shape) == 2
    )


def _elements(tensors: Shapes) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in tensors.values())
