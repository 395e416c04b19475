"""Predict which modules get LoRA from the headers of the weight files.

This saves start time: vLLM can start before torch and the model are loaded.
"""

from __future__ import annotations

import json
from pathlib import Path

from skylite.adapters.lora_modules import matches, short_names
from skylite.config.lora import LoraConfig
from skylite.hub.resolve import safetensors_header, weight_files


def predict_target_modules(model_path: Path, config: LoraConfig) -> list[str]:
    """The target_modules that the trainer's manifest will most likely contain, so that vLLM can start first.

    Weight files do not record module types. This assumes that a matrix in a numbered layer belongs to a
    linear module, and any other matrix to the embedding or LM head. Callers must compare the result with the
    manifest. Raises ModelError for a damaged file.
    """
    tensors = {
        name: tensor
        for file in weight_files(model_path)
        for name, tensor in json.loads(safetensors_header(file)).items()
    }
    paths = [name.split(".") for name in tensors]
    modules = {".".join(path[:end]) for path in paths for end in range(1, len(path))}
    matrices = {
        n.removesuffix(".weight")
        for n, t in tensors.items()
        if n.endswith(".weight") and len(t["shape"]) == 2
    }
    if config.target_modules == "all-linear":
        chosen = {name for name in matrices if any(part.isdigit() for part in name.split("."))}
    else:
        chosen = {name for name in matrices if matches(name, config.target_modules)}
    return short_names(modules, {name for name in chosen if not matches(name, config.exclude_modules)})
