"""Whether a 16-bit model is the one that a quantised base was made from, tensor by tensor."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from skylite.errors import ModelError
from skylite.hub.quantised import Bits4, Format, Fp8, grouped, stored_tensors, widened_shapes
from skylite.hub.resolve import tensor_shapes, weight_files
from skylite.hub.text_model import HEAD, quantised_format
from skylite.untrusted_files import regular

if TYPE_CHECKING:
    from torch import Tensor

SLACK = 1.125
"""Quantisers round quotients, and nested scales, to fewer bits before they round a weight."""
ROUNDED, CALIBRATED = 0.01, 0.5
"""Largest share of a matrix that may be further away than rounding moves it (benchmarks/NOTES.md).

Calibrations such as GPTQ move integers further on purpose, so that their errors cancel.
"""
REMEDY = "Give the model that it was made from, or merge into the widened weights, without --merge-into."


def check_shapes(base: Path, original: Path) -> None:
    """Raise ModelError unless a quantised base has the tensors of a 16-bit model."""
    form = _format(base)
    ours, theirs = widened_shapes(form, base), tensor_shapes(original)
    if other := quantised_format(original):
        raise ModelError(f"{original.name} is quantised, too ({other.name}).", REMEDY)
    for name in sorted(ours.keys() | theirs.keys()):
        # A head that is the embedding may be stored or not, and so may layers that guess further tokens.
        if ours.get(name) != theirs.get(name) and not (name == HEAD or name.startswith("mtp.")):
            raise ModelError(
                f"{_other(base, original)} {name} has the shape {theirs.get(name, 'none')} there, and "
                f"{ours.get(name, 'none')} in the base.",
                REMEDY,
            )


def check_weights(base: Path, original: Path) -> None:
    """Raise ModelError unless a quantised base has the weights of a 16-bit model, rounded.

    What is not quantised must be equal, in the narrower of both dtypes. Reads one tensor at a time.
    """
    form, found = _format(base), dict(_tensors(original))
    for name, value in grouped(form, stored_tensors(base)):
        if name not in found:
            continue
        weight = _read(found[name], name)
        if not isinstance(value, dict):
            if not _equal(value, weight):
                raise ModelError(
                    f"{_other(base, original)} {name} is not quantised, and differs.",
                    f"{REMEDY} AWQ may have scaled it, and then only that works.",
                )
            continue
        away = (form.widen(value, weight.float().dtype) - weight.float()).abs()
        share = float((away > form.half_step(value) * SLACK).float().mean())
        if share > (limit := ROUNDED if isinstance(form, Fp8 | Bits4) else CALIBRATED):
            raise ModelError(
                f"{_other(base, original)} {100 * share:.1f} % of {name} are further away than {form.name} "
                f"rounds (allowed: {100 * limit:g} %).",
                REMEDY,
            )


def _other(base: Path, original: Path) -> str:
    return f"{original.name} is not the model that {base.name} was made from:"


def _format(base: Path) -> Format:
    form = quantised_format(base)
    if form is None:
        raise ModelError(
            f"{base.name} is not quantised, and --merge-into is for a quantised base.",
            "Leave out --merge-into: --merge adds the adapter to the weights of the base.",
        )
    return form


def _tensors(model_path: Path) -> Iterator[tuple[str, Path]]:
    """Each tensor's name and file."""
    from safetensors import safe_open

    for file in weight_files(model_path):
        with safe_open(regular(file), framework="pt") as tensors:
            yield from ((name, file) for name in tensors.keys())  # noqa: SIM118


def _read(file: Path, name: str) -> Tensor:
    from safetensors import safe_open

    with safe_open(file, framework="pt") as tensors:
        found: Tensor = tensors.get_tensor(name)
        return found


def _equal(one: Tensor, other: Tensor) -> bool:
    import torch

    return torch.equal(one, other.to(one.dtype)) or torch.equal(one.to(other.dtype), other)
