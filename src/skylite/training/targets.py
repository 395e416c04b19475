"""Which modules of a model get a LoRA adapter."""

from __future__ import annotations

import re
from collections.abc import Sequence

from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from skylite.config import LoraConfig
from skylite.errors import ModelError


def adapted_modules(model: PreTrainedModel, config: LoraConfig) -> list[str]:
    """Sorted full paths of the modules to adapt. Raises ModelError, naming what there is, when none matches."""
    linear = {name for name, m in model.named_modules() if isinstance(m, nn.Linear | Conv1D)}
    if config.target_modules == "all-linear":
        head = model.get_output_embeddings()
        chosen = {name for name in linear if model.get_submodule(name) is not head}
    else:
        embeddings = {name for name, m in model.named_modules() if isinstance(m, nn.Embedding)}
        chosen = {name for name in linear | embeddings if _matches(name, config.target_modules)}
    chosen = {name for name in chosen if not _matches(name, config.exclude_modules)}
    if not chosen:
        available = ", ".join(sorted({name.rpartition(".")[2] for name in linear}))
        raise ModelError(
            f"No module of {type(model).__name__} matches lora.target_modules={config.target_modules!r} without "
            f"lora.exclude_modules={config.exclude_modules!r}.",
            f"Its linear modules are named: {available}.",
        )
    return sorted(chosen)


def short_names(model: nn.Module, chosen: Sequence[str]) -> list[str]:
    """`chosen` for an adapter_config.json: the last name component where it selects exactly the chosen modules, else the full path."""
    chosen_set = set(chosen)
    unsure = {name.rpartition(".")[2] for name, _ in model.named_modules() if name not in chosen_set}
    return sorted({suffix if (suffix := name.rpartition(".")[2]) not in unsure else name for name in chosen})


def _matches(name: str, patterns: Sequence[str]) -> bool:
    """A pattern is a module name (the end of the path) or a regular expression for the whole path."""
    return any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) is not None for p in patterns)
