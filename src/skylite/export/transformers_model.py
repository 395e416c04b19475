"""Loads a folder with transformers and computes logprobs with it."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from skylite.errors import ModelError


def load_float32(folder: Path, **options: Any) -> Any:
    """A local transformers model in float32. Never runs code from the folder."""
    import torch
    from transformers import AutoModelForCausalLM, modeling_gguf_pytorch_utils
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # skylite shows its own
    # The bar of GGUF files ignores that.
    modeling_gguf_pytorch_utils.tqdm = lambda items, **_: items
    load: Callable[..., Any] = AutoModelForCausalLM.from_pretrained
    try:
        model = load(
            str(folder), dtype=torch.float32, local_files_only=True, trust_remote_code=False, **options
        )
    except (OSError, ValueError, RuntimeError, KeyError) as error:
        raise ModelError(
            f"transformers cannot load {folder}: {type(error).__name__} {error}.",
            "Check that this version of transformers knows the model.",
        ) from None
    return model.eval()


def versions(*packages: str) -> str:
    """Such as `transformers 5.19.0 and peft 0.21.2`."""
    return " and ".join(f"{name} {importlib.metadata.version(name)}" for name in packages)


def model_logprobs(model: Any, sequences: Sequence[Sequence[int]]) -> list[list[float]]:
    """[S][L - 1] logprobs in nats of all tokens but each first, by a transformers model."""
    import torch

    found = []
    with torch.inference_mode():
        for ids in sequences:
            tokens = torch.tensor([list(ids)])
            logits = model(input_ids=tokens, use_cache=False).logits[0, :-1].float()
            chosen = torch.log_softmax(logits, dim=-1).gather(1, tokens[0, 1:, None])
            found.append(chosen[:, 0].tolist())
    return found
