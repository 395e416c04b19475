"""The tensors of an adapter folder: adapter_model.safetensors, or adapter_model.bin as old PEFT wrote it."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skylite.errors import ModelError
from skylite.hub.resolve import safetensors_header, weight_files
from skylite.untrusted_files import regular

if TYPE_CHECKING:
    from torch import Tensor

WEIGHTS, PICKLE = "adapter_model.safetensors", "adapter_model.bin"


def tensor_shapes_of(folder: Path) -> dict[str, list[int]]:
    """Shape of every tensor, read by the library that trainer and engine use. Raises ModelError."""
    path = folder / WEIGHTS
    if not path.is_file():
        return {name: list(tensor.shape) for name, tensor in _read_pickle(folder / PICKLE).items()}
    from safetensors import SafetensorError, safe_open

    safetensors_header(path)  # has a better error message for a truncated file
    try:
        with safe_open(regular(path), framework="numpy") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 -- not a dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The folder is damaged.") from None


def copy_tensors(source: Path, target: Path, without: Mapping[str, str]) -> None:
    """Write adapter_model.safetensors of the folder `source` into `target`, `without` these tensors.

    A copy of the file where that is enough. Raises OSError, ModelError.
    """
    if (source / WEIGHTS).is_file() and not without:
        shutil.copyfile(source / WEIGHTS, target / WEIGHTS)
        return
    from safetensors.torch import load_file, save_file

    tensors = load_file(source / WEIGHTS) if (source / WEIGHTS).is_file() else _read_pickle(source / PICKLE)
    kept = {name: tensor.contiguous().clone() for name, tensor in tensors.items() if name not in without}
    save_file(kept, target / WEIGHTS, {"format": "pt"})


def differing_tensor(folder: Path, saved: Mapping[str, str], model_path: Path) -> str | None:
    """The first of the adapter's tensors `saved` (name -> the base's name) that is not the base's; None: all
    are.

    PEFT saves embeddings and head beside LoRA when one of them has LoRA, trained or not. A head that the base
    has no file for shares the weight of its embedding.
    """
    import torch
    from safetensors.torch import load_file

    if not saved:
        return None
    tensors = load_file(folder / WEIGHTS) if (folder / WEIGHTS).is_file() else _read_pickle(folder / PICKLE)
    for name, base_name in saved.items():
        bases = _base_tensors(model_path, base_name)
        if not any(
            b.shape == tensors[name].shape and torch.equal(b.to(tensors[name].dtype), tensors[name])
            for b in bases
        ):
            return name
    return None


def _base_tensors(model_path: Path, name: str) -> list[Any]:
    """The base's tensor of that name, else its embeddings."""
    from safetensors import safe_open

    embeddings = []
    for file in weight_files(model_path):
        with safe_open(regular(file), framework="pt") as tensors:
            names = set(tensors.keys())
            if name in names:
                return [tensors.get_tensor(name)]
            embeddings += [tensors.get_tensor(other) for other in names if "embed" in other]
    return embeddings


def _read_pickle(path: Path) -> dict[str, Tensor]:
    """The tensors that torch.save wrote. Code in the file does not run. Raises ModelError."""
    import torch

    try:
        tensors = torch.load(regular(path), map_location="cpu", weights_only=True)
        if not all(isinstance(t, torch.Tensor) for t in tensors.values()):
            raise TypeError("it holds more than tensors")
    except Exception as error:  # noqa: BLE001 -- a stranger's pickle fails in any way
        raise ModelError(
            f"{path} is damaged or holds more than tensors, such as code ({type(error).__name__}).",
            "Save the adapter with PEFT as adapter_model.safetensors.",
        ) from None
    return dict(tensors)
