"""The sizes that a run's memory depends on, from the headers of the weight files and config.json."""

from __future__ import annotations

import functools
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from skylite.adapters.experts import expert_layers
from skylite.adapters.target_modules import EXPERTS, pattern_value, predict_modules
from skylite.config.lora import LoraConfig
from skylite.engine.tensor_parallel import HEADS
from skylite.hub.quantised import quantised_modules, split_name
from skylite.hub.resolve import tensor_bytes
from skylite.hub.text_model import (
    TEXT_PATH,
    Shapes,
    model_shapes,
    quantised_format,
    read_config,
    text_layers,
    text_section,
)

FUSED_QKV = ("qkv_proj", "query_key_value", "Wqkv", "c_attn")
LATENT_CACHE = ("axk1", "deepseek_v2", "deepseek_v3", "glm4_moe_lite", "kimi_k2", "pangu_ultra_moe")
"""Model types for which the engine caches one latent vector per token and layer."""
EXPERTS_PER_TOKEN = (
    *("num_experts_per_tok", "num_experts_per_token", "experts_per_token", "top_k_experts"),
    *("moe_topk", "moe_top_k", "moe_k"),
)
"""Names in config.json for the number of experts that compute a token."""
EXPERT_INDICES = 4
"""int64 numbers that a token keeps for each of its experts: orders of rows."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelSizes:
    """What memory depends on. Counts of elements."""

    shapes: Shapes
    """Of all tensors, by name."""
    adapted: Collection[str]
    """Modules with LoRA."""
    config: Mapping[str, Any]
    """config.json."""

    parameters: int
    quantised: int = 0
    """Those of quantised matrices."""
    quantised_bytes: int = 0
    """Of these as they are stored."""
    largest_quantised: int = 0
    """Elements of the largest quantised matrix."""
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
    num_layers: int
    lora: int
    """Parameters of the run's adapter."""
    lora_per_rank: int
    """The same of rank 1."""
    critic_lora: int = 0
    """Parameters of the critic's adapter."""
    kept: int
    """Elements per token that a forward pass keeps over all layers, if norms and activations are recomputed
    (trainer.checkpointing=selective)."""
    recomputed: int
    """Elements per token that checkpointing=none keeps in addition."""
    kept_float32: int
    """float32 elements per token: scales of norms, normalizers of attention, the router's probabilities."""
    queries: int
    """Elements per token of one layer's queries."""
    keys: int
    cached: int | None
    """Elements per token of the engine's KV cache, over all layers. None: unknown."""
    cached_heads: int
    """Key-value heads, which several GPUs divide. 1: each GPU has the complete cache."""

    def weight_bytes(self, item: int) -> int:
        """Of the weights, with `item` bytes for an element that is not quantised."""
        return (self.parameters - self.quantised) * item + self.quantised_bytes

    def widened(self) -> ModelSizes:
        """Those of the same model without quantisation."""
        return replace(self, quantised=0, quantised_bytes=0, largest_quantised=0)

    def per_gpu(self, gpus: int) -> ModelSizes:
        """The part of each of `gpus` GPUs, but for small copies of norms, routers and paddings."""
        heads = min(gpus, self.cached_heads)
        return replace(
            self,
            parameters=math.ceil(self.parameters / gpus),
            quantised=self.quantised // gpus,
            quantised_bytes=math.ceil(self.quantised_bytes / gpus),
            intermediate=math.ceil(self.intermediate / gpus),
            expert_intermediate=math.ceil(self.expert_intermediate / gpus),
            cached=None if self.cached is None else math.ceil(self.cached / heads),
        )


class Attention(NamedTuple):
    """Elements per token of one layer."""

    queries: int
    keys: int
    values: int
    cached: int | None


class Experts(NamedTuple):
    """The routed experts of one layer. All 0 in a layer without."""

    number: int = 0
    per_token: int = 0
    """Experts that compute a token: all if config.json does not tell."""
    inner: int = 0
    """Inner size of one."""


class Kept(NamedTuple):
    """Elements per token of one layer, see ModelSizes."""

    kept: int
    recomputed: int
    float32: int


def model_sizes(model_path: Path, lora: LoraConfig, critic: LoraConfig | None = None) -> ModelSizes:
    """The sizes of a model folder. Raises ModelError for a damaged file.

    The last few are remembered while the files stay as they are: a plan asks at each of its attempts.
    """
    files = sorted((*model_path.glob("*.json"), *model_path.glob("*.safetensors")))
    stamps = tuple((f.name, s.st_mtime_ns, s.st_size) for f in files if (s := f.stat()))
    sizes = _read_sizes(model_path, stamps, lora.model_dump_json())
    return sizes if critic is None else replace(sizes, critic_lora=model_sizes(model_path, critic).lora)


@functools.lru_cache(maxsize=8)
def _read_sizes(model_path: Path, stamps: tuple[tuple[str, int, int], ...], settings: str) -> ModelSizes:
    """`stamps`: of the files. `settings`: of LoRA, as JSON."""
    lora = LoraConfig.model_validate_json(settings)
    config = read_config(model_path)
    adapted = predict_modules(model_path, lora)[1]
    ranks = {path: pattern_value(lora.rank_pattern, path, lora.rank) for path in adapted}
    sizes = sizes_of(model_shapes(model_path), config, ranks)
    if (form := quantised_format(model_path)) is not None:
        stored = tensor_bytes(model_path)
        modules = quantised_modules(form, stored)
        counts = [math.prod(sizes.shapes[f"{module}.weight"]) for module in modules]
        sizes = replace(
            sizes,
            quantised=sum(counts),
            quantised_bytes=sum(size for n, size in stored.items() if split_name(form, n)[0] in modules),
            largest_quantised=max(counts, default=0),
        )
    return sizes


def sizes_of(shapes: Shapes, config: Mapping[str, Any], ranks: Mapping[str, int]) -> ModelSizes:
    """The sizes of a model with these tensors and this config.json. `ranks`: of the modules with LoRA."""
    layers = text_layers(shapes, config)
    embeddings = sorted(
        (n for n, s in shapes.items() if "embed" in n and len(s) == 2),
        key=lambda name: not name.startswith(f"{TEXT_PATH}."),
    )
    vocabulary, hidden = shapes[embeddings[0]] if embeddings else (1, 1)
    section = text_section(config)
    attentions = [attention_of(layer, section) for layer in layers.values()]
    experts = [experts_of(layer, section, hidden) for layer in layers.values()]
    dense = [{n: s for n, s in layer.items() if EXPERTS not in f".{n}"} for layer in layers.values()]
    trained = {p: ranks[p] for p in expert_layers(shapes) if p in ranks}
    shrunk = [
        sum(ranks.get(_path(prefix + n), 0) for n in layer)
        + sum(e.per_token * (hidden + 2 * rank) for p, rank in trained.items() if p.startswith(prefix))
        for (prefix, layer), e in zip(layers.items(), experts, strict=True)
    ]
    kept = [_kept(*parts, hidden) for parts in zip(dense, attentions, experts, shrunk, strict=True)]
    in_layers = [_elements(layer) for layer in layers.values()]
    sides = {path: sum(shape) for name, shape in shapes.items() if (path := _path(name)) in ranks}
    sides |= {p: e.lora_per_rank for p, e in expert_layers(shapes).items() if p in ranks}
    first = attentions[0] if attentions else Attention(0, 0, 0, None)
    cached = [a.cached for a in attentions]
    return ModelSizes(
        shapes=shapes,
        adapted=ranks.keys(),
        config=config,
        parameters=_elements(shapes),
        largest_layer=max(in_layers, default=0),
        outside_layers=_elements(shapes) - sum(in_layers),
        vocabulary=vocabulary,
        hidden=hidden,
        intermediate=max(map(_mlp, dense), default=0),
        experts_per_token=max((e.per_token for e in experts), default=0),
        expert_intermediate=max((e.inner for e in experts), default=0),
        num_layers=len(layers),
        lora=sum(ranks[path] * size for path, size in sides.items()),
        lora_per_rank=sum(sides.values()),
        kept=sum(k.kept for k in kept),
        recomputed=sum(k.recomputed for k in kept),
        kept_float32=sum(k.float32 for k in kept),
        queries=max((a.queries for a in attentions), default=0),
        keys=max((a.keys for a in attentions), default=0),
        cached=None if None in cached or not cached else sum(c or 0 for c in cached),
        cached_heads=_key_value_heads(first, section),
    )


def attention_of(layer: Shapes, config: Mapping[str, Any]) -> Attention:
    """From the layer's own matrices. config.json tells what these do not show."""
    latent, rope = config.get("kv_lora_rank"), config.get("qk_rope_head_dim")
    if latent and _matrix(layer, "kv_a_proj_with_mqa")[0]:
        queries, values = _matrix(layer, "q_b_proj", "q_proj")[0], _matrix(layer, "o_proj")[1]
        cached = config.get("model_type") in LATENT_CACHE and rope and "index_head_dim" not in config
        return Attention(queries, queries, values, latent + rope if cached else None)
    if keys := _matrix(layer, "k_proj")[0]:
        values = _matrix(layer, "v_proj")[0] or keys
        return Attention(_matrix(layer, "q_proj")[0], keys, values, keys + values)
    fused, queries = _matrix(layer, *FUSED_QKV)[0], _query_size(config)
    keys = (fused - queries) // 2
    if not fused or not queries or keys <= 0:
        return Attention(queries, 0, 0, None)
    return Attention(queries, keys, keys, 2 * keys)


def experts_of(layer: Shapes, config: Mapping[str, Any], hidden: int) -> Experts:
    """The experts among a layer's tensors.

    transformers computes the experts of a token in one grouped product (integrations/moe.py). Files hold
    their matrices apart (`experts.5.gate_proj`, or w1), or those of a layer in one (`experts.gate_up_proj`).
    """
    tensors = {name: shape for name, shape in layer.items() if EXPERTS in f".{name}"}
    if not tensors:
        return Experts()
    fused = next((shape for name, shape in tensors.items() if "gate_up_proj" in name and len(shape) == 3), ())
    if fused:  # [experts, 2 inner, hidden], or the last two exchanged
        count, inner = fused[0], math.prod(fused[1:]) // hidden // 2
    else:
        count = len({f".{name}".partition(EXPERTS)[2].partition(".")[0] for name in tensors})
        inner = _matrix(tensors, "gate_proj", "w1")[0]
    per_token = next((n for name in EXPERTS_PER_TOKEN if isinstance(n := config.get(name), int) and n), count)
    return Experts(count, min(per_token, count), inner)


def _query_size(config: Mapping[str, Any]) -> int:
    """Heads times head size; 0 if config.json does not tell."""
    heads = config.get("num_attention_heads") or config.get("n_head") or 0
    hidden = config.get("hidden_size") or config.get("n_embd") or 0
    return int(heads * (config.get("head_dim") or hidden // heads)) if heads else 0


def _key_value_heads(attention: Attention, config: Mapping[str, Any]) -> int:
    heads = next((n for name in HEADS if isinstance(n := config.get(name), int)), 0)
    if config.get("kv_lora_rank") or not attention.queries:
        return 1
    return max(1, attention.keys * heads // attention.queries)


def _kept(layer: Shapes, attention: Attention, experts: Experts, shrunk: int, hidden: int) -> Kept:
    """What the backward pass of one layer needs. `layer` is without routed experts.

    model/fused_ops.py, lora_linear.py and tree_attention.py save: each norm's input and scale, queries, keys,
    values and attention's output, gate and up, and x A^T of each LoRA layer (`shrunk`). Of each expert of a
    token: gate, up, product, output and weight; the router's probabilities, and indices of 8 bytes. Their
    router is frozen, and so are experts without LoRA: they need no input of theirs. `shrunk` has that of
    experts with LoRA.
    """
    queries, keys, values, _ = attention
    gate = _matrix(layer, "gate_proj")[0] or _matrix(layer, "gate_up_proj")[0] // 2
    norms = [name for name, shape in layer.items() if len(shape) == 1 and "norm" in name]
    norm_inputs = sum(queries if "q_norm" in n else keys if "k_norm" in n else hidden for n in norms)
    head_size = next((shape[0] for name, shape in layer.items() if "q_norm" in name), 64)
    routed = experts.per_token * (3 * experts.inner + hidden + 1)
    return Kept(
        norm_inputs + 2 * queries + keys + values + 2 * gate + shrunk + routed,
        (1 if experts.number and not gate else 2) * hidden + gate,
        len(norms) + queries // head_size + experts.number + 2 * EXPERT_INDICES * experts.per_token,
    )


def _mlp(layer: Shapes) -> int:
    """Inner size."""
    one = _matrix(layer, "gate_proj", "up_proj", "fc1", "w1", "dense_h_to_4h")[0]
    return one or _matrix(layer, "gate_up_proj")[0] // 2


def _matrix(layer: Shapes, *names: str) -> Sequence[int]:
    """Output and input size of the first linear layer that has one of these names; (0, 0) without."""
    matrices = (
        shape
        for name in names
        for key, shape in layer.items()
        if f".{key}".endswith(f".{name}.weight") and len(shape) == 2
    )
    return next(matrices, (0, 0))


def _path(tensor: str) -> str:
    """Of the tensor's module."""
    return tensor.removesuffix(".weight")


def _elements(tensors: Shapes) -> int:
    """Elements of all tensors together."""
    return sum(math.prod(shape) for shape in tensors.values())
