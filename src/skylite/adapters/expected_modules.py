"""Which modules a model's adapters will change, out of the headers of its weight files: torch and the model take seconds to load."""

from __future__ import annotations

import json
from pathlib import Path

from skylite.adapters.lora_modules import matches, short_names
from skylite.config.lora import LoraConfig
from skylite.hub.resolve import safetensors_header, weight_files


def predict_target_modules(model_path: Path, config: LoraConfig) -> list[str]:
    """What the trainer's manifest will most likely name as target_modules, so that vLLM can be started before it.

    A file does not say of which kind a module is: a matrix in a numbered layer is taken for a linear module, one elsewhere for embedding
    or head. Whoever uses this compares it with the manifest. Raises ModelError for a damaged file.
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
