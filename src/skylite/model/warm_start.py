"""Loading a finished adapter into fresh LoRA parameters: training in stages. Not a resume: optimizer and step start anew."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import nn

from skylite.errors import ModelError


def peft_file_name(parameter: str) -> str:
    """`...q_proj.lora_A.default.weight` -> `...q_proj.lora_A.weight`: PEFT leaves the adapter's name out of its files."""
    return parameter.replace(".default.weight", ".weight").removesuffix(".default")


def load_adapter_file(folder: Path, params: Mapping[str, nn.Parameter]) -> None:
    """Copy `adapter_model.safetensors` of `folder` into the parameters. Raises ModelError in words when it does not fit exactly."""
    path = folder / "adapter_model.safetensors"
    try:
        tensors = load_file(path)
    except (OSError, SafetensorError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}.", "Give a complete adapter folder to --from-adapter."
        ) from None
    names = {peft_file_name(n): n for n in params}
    if missing := sorted(names.keys() - tensors.keys()):
        raise ModelError(
            f"{folder} lacks {len(missing)} of the {len(names)} LoRA matrices that this run trains, first {missing[0]}.",
            "Train the modules that the adapter has: lora.target_modules and lora.exclude_modules.",
        )
    if extra := sorted(tensors.keys() - names.keys()):
        raise ModelError(
            f"{folder} has {len(extra)} tensors that this run would not train, first {extra[0]}.",
            "Train the modules that the adapter has: lora.target_modules and lora.exclude_modules.",
        )
    for file_name, name in names.items():
        if tensors[file_name].shape != params[name].shape:
            raise ModelError(
                f"{folder}: {file_name} has shape {list(tensors[file_name].shape)}, this run's model and rank need "
                f"{list(params[name].shape)}.",
                "Give the adapter's own base model and --rank.",
            )
        params[name].data.copy_(tensors[file_name])
