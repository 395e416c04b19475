"""Quantised models that vLLM loads as plain ones, with the values of the trainer.

On a CPU all: vLLM 0.32 has no FP8 product there that leaves activations alone, and its INT4 products need
AVX-512. On a GPU those that it does not read, or computes with other values (models.py, widened_reason). The
launcher also takes `quantization_config` out of the model's config (--hf-overrides).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from vllm.model_executor.model_loader import default_loader

from skylite.hub.quantised import widened
from skylite.hub.text_model import quantised_format

_PLAIN = "skylite_plain_tensors"


def install(dtype: str) -> None:
    """Make vLLM read the files of a quantised model as those of a plain one. Safe to call again."""
    read = default_loader.safetensors_weights_iterator
    if hasattr(read, _PLAIN):
        return

    def read_plain(files: list[str], *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        form = quantised_format(Path(os.path.dirname(files[0])))
        tensors = read(files, *args, **kwargs)
        return tensors if form is None else widened(form, tensors, getattr(torch, dtype))

    setattr(read_plain, _PLAIN, True)
    default_loader.safetensors_weights_iterator = read_plain
