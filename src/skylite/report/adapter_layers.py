"""How far each layer of an adapter moved: norm and effective rank of its update, from the kept versions."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, deserialize

from skylite.errors import ModelError
from skylite.untrusted_files import read_bytes, read_text
from skylite.untrusted_text import parse_json

FACTOR = re.compile(r"(?:base_model\.model\.)?(.+)\.lora_(?:embedding_)?([AB])(?:\.weight)?")
LAYER_NUMBER = re.compile(r"\.(\d+)\.")
DTYPES = {"F32": np.float32, "F16": np.float16, "F64": np.float64}
Matrix = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(frozen=True, slots=True, kw_only=True)
class ModuleUpdate:
    """The update alpha / r * B A of one module."""

    layer: int
    """-1 for a module outside of the numbered layers."""
    module: str
    """Last part of its name, such as q_proj."""
    norm: float
    """Frobenius norm."""
    effective_rank: float
    """exp of the entropy of the normalised singular values (Roy & Vetterli 2007); nan for a zero update."""


def layer_updates(adapter: Path) -> list[ModuleUpdate]:
    """The updates of an adapter folder, by layer. Raises ModelError."""
    factors: dict[str, dict[str, Matrix]] = {}
    for name, tensor in _tensors(adapter / "adapter_model.safetensors"):
        if match := FACTOR.fullmatch(name):
            factors.setdefault(match.group(1), {})[match.group(2)] = tensor
    config = _config(adapter / "adapter_config.json")
    updates = [
        _update(name, pair, config)
        for name, pair in factors.items()
        if len(pair) == 2 and pair["A"].ndim == pair["B"].ndim == 2 and len(pair["A"]) == pair["B"].shape[1]
    ]
    return sorted(updates, key=lambda u: (u.layer, u.module))


def singular_values(a: Matrix, b: Matrix) -> Matrix:
    """The singular values of b @ a, largest first, from r x r matrices: the eigenvalues of (b'b)(aa').

    Values under 1e-8 of the largest are lost in rounding, and do not matter here. einsum, because the threads
    of BLAS make products of this size twenty times slower while a run uses the cores.
    """
    weights, vectors = np.linalg.eigh(np.einsum("oi,oj->ij", b, b))
    root = (vectors * np.sqrt(np.maximum(weights, 0.0))) @ vectors.T
    squares = np.linalg.eigvalsh(root @ np.einsum("ik,jk->ij", a, a) @ root)
    return np.asarray(np.sqrt(np.maximum(squares, 0.0))[::-1])


def effective_rank(values: Matrix) -> float:
    """exp(-sum p log p) with p = values / sum(values); nan if all are 0."""
    total = float(values.sum())
    if not total > 0:
        return math.nan
    p = values[values > 0] / total
    return float(np.exp(-(p * np.log(p)).sum()))


def _update(name: str, pair: Mapping[str, Matrix], config: Mapping[str, Any]) -> ModuleUpdate:
    rank = len(pair["A"])
    alpha = config.get("lora_alpha", rank)
    divisor = math.sqrt(rank) if config.get("use_rslora") else rank
    values = singular_values(pair["A"], pair["B"]) * (float(alpha) / divisor)
    layer = LAYER_NUMBER.search(f".{name}.")
    return ModuleUpdate(
        layer=int(layer.group(1)) if layer else -1,
        module=name.rpartition(".")[2],
        norm=float(np.sqrt((values**2).sum())),
        effective_rank=effective_rank(values),
    )


def _tensors(path: Path) -> list[tuple[str, Matrix]]:
    try:
        tensors = deserialize(read_bytes(path))  # type: ignore[no-untyped-call]
        return [(name, _array(spec)) for name, spec in tensors]
    except (OSError, SafetensorError, ValueError) as error:
        raise ModelError(
            f"{path} cannot be read: {error}.", "Run `skylite adapters verify` on the run."
        ) from None


def _array(spec: Mapping[str, Any]) -> Matrix:
    """A tensor as float64. numpy has no bfloat16, which is the upper half of a float32."""
    if spec["dtype"] == "BF16":
        wide = np.frombuffer(spec["data"], np.uint16).astype(np.uint32) << 16
        return wide.view(np.float32).astype(np.float64).reshape(spec["shape"])
    if spec["dtype"] not in DTYPES:
        raise ValueError(f"a tensor has dtype {spec['dtype']}")
    return np.frombuffer(spec["data"], DTYPES[spec["dtype"]]).astype(np.float64).reshape(spec["shape"])


def _config(path: Path) -> Mapping[str, Any]:
    try:
        config = parse_json(read_text(path))
        if not isinstance(config, dict) or not isinstance(config.get("lora_alpha", 1.0), int | float):
            raise ValueError("lora_alpha is not a number")
        return config
    except (OSError, ValueError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The adapter is damaged.") from None
