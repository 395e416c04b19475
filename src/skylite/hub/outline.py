"""A model without its weights: config.json, and a file with the headers that its weights would have.

The file has a hole for the weights, so it takes no space. What reads shapes, reads them there as in a model.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from skylite.errors import ModelError
from skylite.hub.families import family_of
from skylite.hub.hub_client import HubRefusal, hub_refusals
from skylite.hub.resolve import SMOLLM2, WITHOUT_HUB, causal_config, resolve_model, weight_files
from skylite.hub.text_model import (
    Shapes,
    auto_class,
    model_shapes,
    quantised_format,
    read_config,
    text_layers,
)
from skylite.processes.private_folders import temporary_folder
from skylite.progress_reporting import long_work

ITEM_BYTES = {"BF16": 2, "I32": 4}
GROUP = 128
AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
"""quantization_config of most models that are published in 4 bits."""


@contextlib.contextmanager
def model_or_outline(name: str) -> Iterator[Path]:
    """The folder of a model for as long as the block lasts: its own, or an outline where it has no weights.

    `name`: a hub id, of which config.json alone is downloaded, a folder, or a config.json. Raises ModelError.
    """
    path = Path(os.path.expanduser(name))
    file = path if os.path.isfile(path) else path / "config.json"
    if name == SMOLLM2:
        file = resolve_model(name).path / "config.json"
    elif not os.path.exists(path) and name.count("/") == 1 and not name.startswith((".", "/", "~")):
        file = _config_from_hub(name)
    causal_config(file)
    if file.name == "config.json" and _has_weights(file.parent):
        yield file.parent
        return
    with temporary_folder("plan-") as folder:
        where = name if not os.path.exists(path) else file.absolute().parent.name
        outline = folder / (where.rpartition("/")[2] if file.name == "config.json" else file.stem)
        outline.mkdir()
        shutil.copyfile(file, outline / "config.json")
        write_headers(outline, _shapes_of_config(outline))
        yield outline


def write_headers(folder: Path, shapes: Shapes, types: Mapping[str, str] | None = None) -> None:
    """Write model.safetensors with these tensors, in bfloat16 but for `types`, and a hole for their data."""
    header, end = dict[str, Any](), 0
    for name, shape in shapes.items():
        kind = (types or {}).get(name, "BF16")
        start, end = end, end + ITEM_BYTES[kind] * math.prod(shape)
        header[name] = {"dtype": kind, "shape": list(shape), "data_offsets": [start, end]}
    text = json.dumps(header).encode()
    with (folder / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


def write_quantised(model: Path, folder: Path) -> bool:
    """Write the outline of a model with the matrices of its layers in 4 bits, as AWQ stores them.

    Returns whether skylite trains such a model: not if it is quantised already, or has experts.
    """
    config, plain = read_config(model), model_shapes(model)
    if quantised_format(model) is not None or any(".experts." in f".{name}" for name in plain):
        return False
    shapes, types = dict[str, Sequence[int]](), dict[str, str]()
    layers = tuple(text_layers(plain, config))
    for name, shape in plain.items():
        path, weight, _ = name.rpartition(".weight")
        fits = len(shape) == 2 and shape[0] % 8 == 0 and shape[1] % GROUP == 0
        if not weight or not fits or not name.startswith(layers):
            shapes[name] = shape
            continue
        outputs, inputs = shape
        groups = inputs // GROUP
        shapes[f"{path}.qweight"], types[f"{path}.qweight"] = (inputs, outputs // 8), "I32"
        shapes[f"{path}.qzeros"], types[f"{path}.qzeros"] = (groups, outputs // 8), "I32"
        shapes[f"{path}.scales"] = (groups, outputs)
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps({**config, "quantization_config": AWQ}), encoding="utf-8")
    write_headers(folder, shapes, types)
    return True


def _has_weights(folder: Path) -> bool:
    try:
        return bool(weight_files(folder))
    except ModelError:
        return False


def _config_from_hub(name: str) -> Path:
    from huggingface_hub import hf_hub_download

    try:
        with hub_refusals(name, "model"):
            return Path(hf_hub_download(name, "config.json"))
    except HubRefusal as refusal:
        raise ModelError(
            f"config.json of {name!r} cannot be downloaded: {refusal.reason}", refusal.remedy or WITHOUT_HUB
        ) from None


def _shapes_of_config(folder: Path) -> dict[str, list[int]]:
    """Shape of each tensor of the model that transformers makes from config.json, without memory for it."""
    family_of(read_config(folder), folder.name)
    if (form := quantised_format(folder)) is not None:
        raise ModelError(
            f"{folder.name} is quantised ({form.name}), and its config.json does not say which matrices are.",
            "Download the model and name its folder.",
        )
    with long_work(f"making the shapes of {folder.name} from its config.json"):
        import torch
        from transformers import AutoConfig

        try:
            config = AutoConfig.from_pretrained(folder, trust_remote_code=False)
            with torch.device("meta"):
                model = auto_class(config).from_config(config, trust_remote_code=False)
        except Exception as error:  # noqa: BLE001 a config.json of a stranger may raise anything there
            reason = str(error).strip().partition("\n")[0] or type(error).__name__
            raise ModelError(
                f"transformers makes no model from the config.json of {folder.name}: {reason[:300]}",
                "Correct that file, or name a model that `skylite models` lists.",
            ) from None
    return {name: list(tensor.shape) for name, tensor in model.named_parameters()}
