"""Tiny models in published quantised formats, and the same models with plain weights of the same values."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from skylite.hub.quantised import widened
from skylite.hub.text_model import quantised_format

GROUP = 32
"""Columns that share a scale in INT4."""
BLOCK = (48, 40)
"""Of FP8. The matrices are 64 and 128 wide: the last blocks are smaller."""
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Column that AWQ puts at the k-th place of an int32 (casper-hansen/AutoAWQ, packing_utils.py)."""

Quantise = Callable[[Tensor], dict[str, Tensor]]
"""A matrix [O, I] -> its parts."""


def fp8(weight: Tensor, scale: Tensor) -> Tensor:
    return (weight / scale).to(torch.float8_e4m3fn)


def fp8_block(weight: Tensor, part: str = "weight_scale_inv") -> dict[str, Tensor]:
    rows, columns = weight.shape
    scales = torch.tensor([
        [
            float(weight[r : r + BLOCK[0], c : c + BLOCK[1]].abs().max()) / 448
            for c in range(0, columns, BLOCK[1])
        ]
        for r in range(0, rows, BLOCK[0])
    ])  # fmt: skip
    of_elements = scales[torch.arange(rows) // BLOCK[0]][:, torch.arange(columns) // BLOCK[1]]
    return {"weight": fp8(weight, of_elements), part: scales}


def fp8_channel(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.abs().amax(1, keepdim=True) / 448).to(torch.bfloat16)
    return {"weight": fp8(weight, scale.float()), "weight_scale": scale}


def fp8_tensor(weight: Tensor) -> dict[str, Tensor]:
    scale = (weight.abs().max() / 448).view(1)
    return {"weight": fp8(weight, scale), "weight_scale": scale, "input_scale": torch.ones(1)}


def integers(weight: Tensor, bits: int, *, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Unsigned numbers [O, I], scales and zero points [O, G]."""
    groups = weight.unflatten(1, (-1, GROUP))
    largest, middle = 2**bits - 1, 2 ** (bits - 1)
    if symmetric:
        scales = (groups.abs().amax(-1) / (middle - 1)).half()
        zeros = torch.full_like(scales, middle)
    else:
        low, high = groups.amin(-1), groups.amax(-1)
        scales = ((high - low) / largest).half()
        zeros = (-low / scales).round().clamp(0, largest)
    numbers = (groups / scales[..., None].float() + zeros[..., None].float()).round().clamp(0, largest)
    return numbers.flatten(1).long(), scales, zeros.long()


def pack(numbers: Tensor, bits: int, dim: int, order: tuple[int, ...] | None = None) -> Tensor:
    """int32: neighbours along `dim`, from the lowest bits. `order`: which neighbour comes at a place."""
    per, moved = 32 // bits, numbers.movedim(dim, -1)
    packed = torch.zeros(*moved.shape[:-1], moved.shape[-1] // per, dtype=torch.int64)
    for place, neighbour in enumerate(order or range(per)):
        packed += moved[..., neighbour::per] << (bits * place)
    return packed.to(torch.int32).movedim(-1, dim).contiguous()  # wraps above 2^31, as files do


def packed_int(weight: Tensor, bits: int, *, symmetric: bool) -> dict[str, Tensor]:
    numbers, scales, zeros = integers(weight, bits, symmetric=symmetric)
    parts = {"weight_packed": pack(numbers, bits, 1), "weight_scale": scales}
    parts["weight_shape"] = torch.tensor(weight.shape)
    return parts if symmetric else parts | {"weight_zero_point": pack(zeros, bits, 0)}


def gptq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros = integers(weight, 4, symmetric=True)
    return {
        "qweight": pack(numbers.t(), 4, 0),
        "scales": scales.t().contiguous(),
        "qzeros": pack(zeros.t() - 1, 4, 1),
        "g_idx": torch.arange(weight.shape[1]) // GROUP,
    }


def awq(weight: Tensor) -> dict[str, Tensor]:
    numbers, scales, zeros = integers(weight, 4, symmetric=False)
    return {
        "qweight": pack(numbers.t(), 4, 1, AWQ_ORDER),
        "scales": scales.t().contiguous(),
        "qzeros": pack(zeros.t(), 4, 1, AWQ_ORDER),
    }


def bits4(weight: Tensor, kind: str = "nf4", *, nested: bool) -> dict[str, Tensor]:
    """As bitsandbytes stores a matrix, with blocks of 64; the values of a half byte are made up."""
    values = torch.linspace(-1, 1, 16) ** 3
    blocks = weight.reshape(-1, 64)
    scales = blocks.abs().amax(1)
    numbers = ((blocks / scales[:, None])[..., None] - values).abs().argmin(-1).flatten().to(torch.uint8)
    state: dict[str, Any] = {
        "quant_type": kind,
        "blocksize": 64,
        "dtype": "float32",
        "shape": [*weight.shape],
    }
    parts = {"weight": (numbers[::2] << 4 | numbers[1::2])[:, None], "weight.quant_map": values}
    if nested:
        of_scales, offset = torch.linspace(-1, 1, 256), scales.mean()
        largest = torch.stack([block.abs().max() for block in (scales - offset).split(256)])
        relative = (scales - offset) / largest.repeat_interleave(256)[: len(scales)]
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": float(offset)}
        parts |= {"weight.nested_absmax": largest, "weight.nested_quant_map": of_scales}
        scales = (relative[:, None] - of_scales).abs().argmin(-1).to(torch.uint8)
    data = torch.tensor(list(json.dumps(state).encode()), dtype=torch.uint8)
    return parts | {"weight.absmax": scales, f"weight.quant_state.bitsandbytes__{kind}": data}


def compressed(form: str, activations: Mapping[str, Any] | None = None, **weights: Any) -> dict[str, Any]:
    """A quantization_config of compressed-tensors."""
    weights = {"symmetric": True, "dynamic": False, **weights}
    group = {"targets": ["Linear"], "weights": weights, "input_activations": activations}
    return {
        "quant_method": "compressed-tensors", "format": form, "ignore": ["lm_head"],
        "config_groups": {"group_0": group},
    }  # fmt: skip


DYNAMIC: dict[str, Any] = {
    "num_bits": 8,
    "type": "float",
    "strategy": "token",
    "dynamic": True,
    "symmetric": True,
}
FLOAT8: dict[str, Any] = {"num_bits": 8, "type": "float"}
INT4: dict[str, Any] = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": GROUP}
NF4 = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}

FORMATS: dict[str, tuple[dict[str, Any], Quantise]] = {
    "fp8 block": (
        {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": list(BLOCK)},
        fp8_block,
    ),
    "fp8 tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, fp8_tensor),
    "ct fp8 channel": (compressed("float-quantized", DYNAMIC, **FLOAT8, strategy="channel"), fp8_channel),
    "ct fp8 tensor": (compressed("float-quantized", DYNAMIC, **FLOAT8, strategy="tensor"), fp8_tensor),
    "ct fp8 block": (
        compressed("float-quantized", DYNAMIC, **FLOAT8, strategy="block", block_structure=list(BLOCK)),
        lambda weight: fp8_block(weight, "weight_scale"),
    ),
    "ct int4": (compressed("pack-quantized", **INT4), lambda w: packed_int(w, 4, symmetric=True)),
    "ct int4 asymmetric": (
        compressed("pack-quantized", **INT4, symmetric=False), lambda w: packed_int(w, 4, symmetric=False),
    ),
    "ct int8": (
        compressed("pack-quantized", **{**INT4, "num_bits": 8}), lambda w: packed_int(w, 8, symmetric=True),
    ),
    "gptq": ({"quant_method": "gptq", "bits": 4, "group_size": GROUP, "desc_act": False, "sym": True}, gptq),
    "awq": ({"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True}, awq),
    "nf4": (NF4, lambda w: bits4(w, nested=False)),
    "nf4 nested": ({**NF4, "bnb_4bit_use_double_quant": True}, lambda w: bits4(w, nested=True)),
}  # fmt: skip


def quantise_model(source: Path, folder: Path, name: str) -> Path:
    """The model of `source` with its layers' matrices in a format of FORMATS, saved in `folder`."""
    settings, quantise = FORMATS[name]
    tensors = dict[str, Tensor]()
    for path, tensor in load_file(source / "model.safetensors").items():
        if ".layers." in path and path.endswith("_proj.weight"):
            module = path.removesuffix(".weight")
            tensors |= {f"{module}.{part}": value for part, value in quantise(tensor).items()}
        else:
            tensors[path] = tensor
    return write_model(source, folder, tensors, settings)


def widen_model(source: Path, folder: Path, dtype: torch.dtype = torch.float32) -> Path:
    """The quantised model of `source` with plain matrices of the same values."""
    form = quantised_format(source)
    assert form is not None
    tensors = widened(form, load_file(source / "model.safetensors").items(), dtype)
    return write_model(source, folder, dict(tensors), None)


def write_model(
    source: Path, folder: Path, tensors: Mapping[str, Tensor], settings: Mapping[str, Any] | None
) -> Path:
    shutil.copytree(source, folder)
    config = json.loads((folder / "config.json").read_text())
    config.pop("quantization_config", None)
    config |= {} if settings is None else {"quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors", {"format": "pt"})
    return folder
