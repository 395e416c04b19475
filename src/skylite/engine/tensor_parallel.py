"""What engines require of a model whose matrices are divided among several GPUs (tensor parallelism).

They divide attention by heads and the MLP by its inner size. Key-value heads are divided too or, if there
are fewer than GPUs, copied. They pad the vocabulary to a multiple of VOCABULARY_MULTIPLE.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from shutil import disk_usage
from typing import Any

from skylite.errors import ConfigError
from skylite.hub.text_model import read_config, text_section
from skylite.processes.hardware import SHARED_MEMORY

SETTING = "engine.tensor_parallel"
QUEUE_BYTES = 240 << 20
"""The largest queue between an engine's workers. They start only if so much is free."""
VOCABULARY_MULTIPLE = 64
"""DEFAULT_VOCAB_PADDING_SIZE of the engines."""
HEADS = ("num_attention_heads", "n_head", "n_heads")
KEY_VALUE_HEADS = ("num_key_value_heads", "num_kv_heads", "n_head_kv")
INNER_SIZES = (
    "intermediate_size",
    "intermediate_size_mlp",
    "moe_intermediate_size",
    "shared_expert_intermediate_size",
    "ffn_hidden_size",
    "n_inner",
)
"""Names of the MLP's inner sizes. Those of experts are divided too."""


def check_divisible(model_path: Path, gpus: int) -> None:
    """Raise ConfigError if no engine can divide the model in this folder among this many GPUs."""
    if gpus == 1:
        return
    config = text_section(read_config(model_path))
    if reason := next(_obstacles(config, gpus), None):
        possible = [n for n in range(2, gpus) if next(_obstacles(config, n), None) is None]
        raise ConfigError(
            f"{SETTING}={gpus} does not divide {model_path.name}: {reason}.",
            f"Use {SETTING}={' or '.join(map(str, reversed(possible[-3:]))) or 1}.",
        )


def check_count(gpus: int, visible: int, names: str) -> None:
    """Raise ConfigError if one engine needs more GPUs than there are."""
    if gpus > visible:
        raise ConfigError(
            f"{SETTING}={gpus} needs {gpus} GPUs for each engine, and {visible} can be used: "
            f"{names or 'none'}.",
            f"Use {SETTING}={max(1, visible)}, or make more GPUs visible (CUDA_VISIBLE_DEVICES).",
        )


def check_shared_memory(gpus: int) -> None:
    """Raise ConfigError if an engine of several GPUs needs more shared memory than is free."""
    if gpus > 1 and SHARED_MEMORY.is_dir() and (free := disk_usage(SHARED_MEMORY).free) < QUEUE_BYTES:
        raise ConfigError(
            f"{SETTING}={gpus} needs {QUEUE_BYTES >> 20} MiB in {SHARED_MEMORY} for the queues of the "
            f"engine's workers, and {free >> 20} MiB are free.",
            "Give the container more: docker run --shm-size=2g, or --ipc=host.",
        )


def padded_vocabulary(vocabulary: int) -> int:
    """The rows of an engine's embedding and head."""
    return math.ceil(vocabulary / VOCABULARY_MULTIPLE) * VOCABULARY_MULTIPLE


def _obstacles(config: Mapping[str, Any], gpus: int) -> Iterator[str]:
    for name, heads in _sizes(config, HEADS):
        if heads % gpus:
            yield f"{name}={heads} must be a multiple of it"
    for name, heads in _sizes(config, () if config.get("kv_lora_rank") else KEY_VALUE_HEADS):
        if heads % gpus and gpus % heads:
            yield f"{name}={heads} must be a multiple of it, or divide it"
    for name, size in _sizes(config, INNER_SIZES):
        if size % gpus:
            yield f"{name}={size} must be a multiple of it"
    for name, size in _sizes(config, ("vocab_size",)):
        if padded_vocabulary(size) % gpus:
            yield f"{name}={size}, padded to {padded_vocabulary(size)}, must be a multiple of it"


def _sizes(config: Mapping[str, Any], names: tuple[str, ...]) -> Iterator[tuple[str, int]]:
    """Each size that config.json names; some models give one for each layer."""
    for name in names:
        value = config.get(name)
        yield from (
            (name, n) for n in (value if isinstance(value, list) else [value]) if isinstance(n, int) and n
        )
