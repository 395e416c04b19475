"""Selects the modules of a model that get a LoRA adapter."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skylite.adapters.target_modules import matches
from skylite.config.lora import LoraConfig
from skylite.errors import ModelError


def adapted_modules(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Sorted paths of the modules to adapt. Raises ModelError, which lists the modules, if none matches."""
    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    if config.target_modules == "all-linear":
        head = model.get_output_embeddings()
        selected = {name for name in linear if model.get_submodule(name) is not head}
    else:
        embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        selected = {name for name in linear | embeddings if matches(name, config.target_modules)}
    selected = {name for name in selected if not matches(name, config.exclude_modules)}
    if not selected:
        available = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ModelError(
            f"No module of {type(model).__name__} matches lora.target_modules={config.target_modules!r} "
            f"without lora.exclude_modules={config.exclude_modules!r}.",
            f"Use names of its linear modules: {available}.",
        )
    return sorted(selected)
