"""Names of modules that get LoRA: match patterns, and the short names in adapter_config.json and vLLM."""

from __future__ import annotations

import re
from collections.abc import Iterable, Sequence
from pathlib import Path

from skylite.config.lora import LoraConfig
from skylite.hub.resolve import tensor_shapes

EXPERTS = ".experts."
"""In the names of weights of experts. transformers joins those of a layer in parameters of one module."""
ROUTERS = ("mlp.gate", "block_sparse_moe.gate", "mlp.router", "router.layer")
"""Ends of paths of expert routers. transformers computes them without a linear module."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module path matches a pattern: the end of the path, or a regex for the full path."""
    return any(name == p or name.endswith(f".{p}") or re.fullmatch(p, name) is not None for p in patterns)


def short_names(modules: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """Shorten the full paths `chosen` to their last component where it is unambiguous; sorted.

    A component that also occurs in `modules` outside of `chosen` is ambiguous; those paths stay full.
    """
    chosen = set(chosen)
    ambiguous = {name.rpartition(".")[2] for name in modules if name not in chosen}
    return sorted(
        {suffix if (suffix := name.rpartition(".")[2]) not in ambiguous else name for name in chosen}
    )


def predict_target_modules(model_path: Path, config: LoraConfig) -> list[str]:
    """The target_modules that the trainer's manifest will most likely contain, so that vLLM can start first.

    Callers must compare the result with the manifest. Raises ModelError for a damaged file.
    """
    return short_names(*predict_modules(model_path, config))


def predict_modules(model_path: Path, config: LoraConfig) -> tuple[set[str], set[str]]:
    """Paths of all modules with weights, and of those that most likely get LoRA, read from the weight files.

    Weight files do not record module types. This assumes that a matrix in a numbered layer belongs to a
    linear module, and any other matrix to the embedding or LM head. Experts and their routers get no LoRA.
    Raises ModelError for a damaged file.
    """
    shapes = {name: s for name, s in tensor_shapes(model_path).items() if EXPERTS not in name}
    paths = [name.split(".") for name in shapes]
    modules = {".".join(path[:end]) for path in paths for end in range(1, len(path))}
    matrices = {n.removesuffix(".weight") for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}
    matrices = {name for name in matrices if not matches(name, ROUTERS)}
    if config.target_modules == "all-linear":
        chosen = {name for name in matrices if any(part.isdigit() for part in name.split("."))}
    else:
        chosen = {name for name in matrices if matches(name, config.target_modules)}
    return modules, {name for name in chosen if not matches(name, config.exclude_modules)}
