"""What the sweep of model families found: which the trainer computes, how, and how exactly.

families.json is written by `make models-sweep` (tests/model_sweep.py), which trains a tiny random model of
each family of the installed transformers. Reading it takes milliseconds, importing transformers seconds.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal

from skylite.errors import ModelError
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

TABLE = Path(__file__).with_name("families.json")


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """The models of one `model_type` in config.json."""

    name: str
    """The model_type."""
    architecture: str
    """transformers' class; empty if no tiny model could be made."""
    refused: str
    """Why the trainer does not compute it; empty if it does."""
    packing: Literal["tree", "padded"] | None = None
    """How sequences form a call (model/packing.py)."""
    packing_reason: str = ""
    """Why not as a tree."""
    logprobs: float = 0.0
    """Largest difference to transformers and PEFT on padded rows, in nats."""
    gradient: float = 0.0
    """The same of the LoRA gradient, relative, in float32."""
    experts: bool = False
    expert_lora: bool = False
    """Whether experts may have LoRA (lora.target_parameters)."""
    parts: bool = False
    """Whether it also reads pictures or sound."""
    on_gpu: str = ""
    """Why vLLM does not serve it with LoRA on GPUs; empty if it does."""
    on_cpu: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class Sweep:
    """families.json."""

    transformers: str
    vllm: str
    families: Mapping[str, Family]
    """By name."""


@functools.cache
def read_sweep() -> Sweep:
    """The table."""
    tree = parse_json(read_text(TABLE))
    families = {entry["name"]: Family(**entry) for entry in tree["families"]}
    return Sweep(transformers=tree["transformers"], vllm=tree["vllm"], families=families)


def family_of(config: Mapping[str, Any], name: str) -> Family | None:
    """The family of the model `name` with this config.json.

    None: the installed transformers is another one than the sweep's, and may know it. Raises ModelError for a
    family that the trainer does not compute.
    """
    kind, sweep = config.get("model_type"), read_sweep()
    if not isinstance(kind, str):
        raise ModelError(
            f"The config.json of {name} names no model_type, so transformers does not know its class.",
            "Save the model again with save_pretrained.",
        )
    family = sweep.families.get(kind)
    if family is None and version("transformers") == sweep.transformers:
        raise ModelError(
            f"{name} is a model of type {kind[:60]!r}, which transformers {sweep.transformers} does not know "
            "as a language model, and skylite runs no code of a model folder.",
            "Choose another model: `skylite models` lists the families that train.",
        )
    if family is not None and family.refused:
        raise ModelError(
            f"{name} is a model of type {kind}, which skylite does not train: {family.refused}.",
            "Choose another model: `skylite models` lists the families that train.",
        )
    return family
