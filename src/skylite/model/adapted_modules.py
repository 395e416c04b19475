"""Which modules of a model get a LoRA adapter."""

from __future__ import annotations

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skylite.adapters.lora_modules import matches
from skylite.config.lora import LoraConfig
from skylite.errors import ModelError


def adapted_modules(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Sorted full paths of the modules to adapt. Raises ModelError, naming what there is, when none matches."""
    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    if config.target_modules == "all-linear":
        head = model.get_output_embeddings()
        chosen = {name for name in linear if model.get_submodule(name) is not head}
    else:
        embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        chosen = {name for name in linear | embeddings if matches(name, config.target_modules)}
    chosen = {name for name in chosen if not matches(name, config.exclude_modules)}
    if not chosen:
        available = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ModelError(
            f"No module of {type(model).__name__} matches lora.target_modules={config.target_modules!r} without "
            f"lora.exclude_modules={config.exclude_modules!r}.",
            f"Its linear modules are named: {available}.",
        )
    return sorted(chosen)
