"""Warm start: copies a finished adapter into fresh LoRA parameters. Optimizer and steps start again."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from skylite.adapters.import_adapter import usual_name
from skylite.errors import ModelError
from skylite.untrusted_files import regular


def peft_tensor_name(parameter: str) -> str:
    """Name of a parameter in PEFT's files, which leave out the adapter's name.

    `...q_proj.lora_A.default.weight` -> `...q_proj.lora_A.weight`
    """
    return parameter.replace(".default.weight", ".weight").removesuffix(".default")


def load_adapter_file(folder: Path, params: Mapping[str, nn.Parameter]) -> None:
    """Copy `adapter_model.safetensors` of `folder` into `params`.

    Raises ModelError if the file cannot be read, or if its names or shapes are not exactly those of `params`.
    """
    path = folder / "adapter_model.safetensors"
    try:
        tensors = {usual_name(name): tensor for name, tensor in load_file(regular(path)).items()}
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}.", "Give a complete adapter folder to --from-adapter."
        ) from None
    names = {peft_tensor_name(n): n for n in params}
    remedy = "Train the modules that the adapter has: set lora.target_modules and lora.exclude_modules."
    if missing := sorted(names.keys() - tensors.keys()):
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} LoRA matrices that this run trains, "
            f"first {missing[0]}.",
            remedy,
        )
    if extra := sorted(tensors.keys() - names.keys()):
        raise ModelError(
            f"{folder} has {len(extra)} tensors that this run would not train, first {extra[0]}.", remedy
        )
    for tensor_name, name in names.items():
        if tensors[tensor_name].shape != params[name].shape:
            raise ModelError(
                f"{folder}: {tensor_name} has shape {list(tensors[tensor_name].shape)}, "
                f"but this run's model and rank need {list(params[name].shape)}.",
                "Use the adapter's own base model and --rank.",
            )
        params[name].data.copy_(tensors[tensor_name])
