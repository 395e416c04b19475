"""What one GPU of a tensor-parallel engine holds of a model.

vLLM divides the outputs of some linear layers and the inputs of others. LoRA's A has the layer's inputs and B
its outputs, so one of both is divided and the other is complete on every GPU (vLLM's create_lora_weights
without fully_sharded_loras). Modules whose names are not here count in full: the prediction is then too high.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from fractions import Fraction
from pathlib import Path
from typing import Any

from skylite.adapters.target_modules import LM_HEADS, predict_modules
from skylite.config.lora import LoraConfig
from skylite.engine.tensor_parallel import HEADS, padded_vocabulary, text_section
from skylite.engine.vllm.servable_models import packed_layers
from skylite.hub.resolve import tensor_shapes
from skylite.resources.model_sizes import (
    FUSED_QKV,
    Attention,
    ModelSizes,
    Shapes,
    attention_of,
    text_layers,
    with_packed,
)
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

BY_OUTPUTS = (
    *("q_proj", "q_b_proj", "kv_b_proj", "gate_proj", "up_proj", "gate_up_proj", "fc1", "w1", "w3"),
    *("dense_h_to_4h", "c_fc"),
)
"""Layers of which every GPU has some outputs."""
BY_KEY_VALUE_HEADS = ("k_proj", "v_proj")
BY_INPUTS = ("o_proj", "down_proj", "fc2", "w2", "dense", "dense_4h_to_h", "out_proj", "c_proj")
"""Layers of which every GPU has some inputs."""
EMBEDDINGS = ("embed_tokens", "wte", "word_embeddings", "embed_in")
UNDIVIDED = Fraction(1)


@dataclass(frozen=True, slots=True)
class Share:
    """Of a layer's outputs and inputs, on one GPU."""

    outputs: Fraction = UNDIVIDED
    inputs: Fraction = UNDIVIDED


def sizes_per_gpu(sizes: ModelSizes, model_path: Path, lora: LoraConfig, gpus: int) -> ModelSizes:
    """`sizes` with what vLLM holds on each of `gpus` GPUs, for its prediction only."""
    if gpus == 1:
        return sizes
    config = parse_json(read_text(model_path / "config.json"))
    return divided_sizes(sizes, tensor_shapes(model_path), config, predict_modules(model_path, lora)[1], gpus)


def divided_sizes(
    sizes: ModelSizes, shapes: Shapes, config: Mapping[str, Any], adapted: Collection[str], gpus: int
) -> ModelSizes:
    """The same for a model with these tensors and this config.json, and LoRA on the modules `adapted`."""
    section = text_section(config)
    layers = text_layers(shapes)
    attentions = {prefix: attention_of(layer, section) for prefix, layer in layers.items()}
    shares: dict[str, Share] = {}
    for prefix, layer in layers.items():
        heads = _key_value_share(attentions[prefix], section, gpus)
        shares |= {prefix + name: _share(name, attentions[prefix], heads, gpus) for name in layer}
    parameters = sum(_elements(name, shape, shares.get(name), gpus) for name, shape in shapes.items())
    slots = with_packed(shapes, adapted, packed_layers(config))
    cached = [
        (a.cached or 0) * (UNDIVIDED if section.get("kv_lora_rank") else _key_value_share(a, section, gpus))
        for a in attentions.values()
    ]
    return replace(
        sizes,
        parameters=math.ceil(parameters),
        intermediate=math.ceil(sizes.intermediate / gpus),
        expert_intermediate=math.ceil(sizes.expert_intermediate / gpus),
        slots_per_rank=math.ceil(
            sum(_slots(shapes[f"{path}.weight"], shares.get(f"{path}.weight", Share())) for path in slots)
        ),
        cached=None if sizes.cached is None else math.ceil(sum(cached)),
    )


def _share(name: str, attention: Attention, key_value_heads: Fraction, gpus: int) -> Share:
    """For a tensor of a layer: `self_attn.q_proj.weight`, or experts without `.weight`."""
    module = _module(name)
    part = Fraction(1, gpus)
    if module in BY_OUTPUTS:
        return Share(outputs=part)
    if module in BY_KEY_VALUE_HEADS:
        return Share(outputs=key_value_heads)
    if module in FUSED_QKV and attention.keys:
        queries = Fraction(attention.queries, attention.queries + 2 * attention.keys)
        return Share(outputs=queries * part + (1 - queries) * key_value_heads)
    return Share(inputs=part) if module in BY_INPUTS else Share()


def _key_value_share(attention: Attention, config: Mapping[str, Any], gpus: int) -> Fraction:
    """Of the key-value heads, on one GPU: at least one head. All if config.json does not name the heads."""
    heads = next((n for name in HEADS if isinstance(n := config.get(name), int)), 0)
    if not heads or not attention.queries or not attention.keys:
        return UNDIVIDED
    key_value_heads = max(1, attention.keys * heads // attention.queries)
    return Fraction(max(1, key_value_heads // gpus), key_value_heads)


def _elements(name: str, shape: Collection[int], share: Share | None, gpus: int) -> Fraction:
    """Elements of a tensor on one GPU. A bias has its layer's outputs."""
    count = Fraction(math.prod(shape))
    if share is not None:
        return count * share.outputs * (share.inputs if len(shape) > 1 else 1)
    if _module(name) in (*EMBEDDINGS, *LM_HEADS):
        rows = next(iter(shape))
        return count * Fraction(padded_vocabulary(rows), rows * gpus)
    return count


def _slots(shape: Collection[int], share: Share) -> Fraction:
    """Elements of A and B at rank 1 on one GPU. Those of embeddings are complete on each."""
    outputs, inputs = shape
    return outputs * share.outputs + inputs * share.inputs


def _module(name: str) -> str:
    path = name.removesuffix(".weight").removesuffix(".bias")
    return path.rpartition(".")[2]
