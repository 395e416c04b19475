"""Quantised weights as they are published: what config.json must say, and the values of a stored matrix.

A format is a frozen record. `widen` gives the values that an engine computes with when it leaves activations
alone: scales are rounded to the compute dtype first, as vLLM loads them. A trainer and an engine that widen
by other rules sample from one model and train another.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol

from skylite.errors import ModelError
from skylite.hub.resolve import small_tensors, tensor_shapes, weight_files
from skylite.untrusted_files import regular
from skylite.untrusted_text import parse_json

if TYPE_CHECKING:
    import torch
    from torch import Tensor

AWQ_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
"""Where AWQ puts eight neighbours in an int32."""
PACKED = ("float8", "uint8")
"""dtypes of a quantised matrix that is stored under the name of a plain one."""
NESTED_BLOCK = 256
"""Scales of bitsandbytes that share a scale of their own; its own products take no other number."""
REMEDY = (
    "Use a version in FP8, in NF4, or in weight-only INT4 or INT8 of compressed-tensors, GPTQ or AWQ, or the "
    "16-bit model that it was made from."
)


class Format(Protocol):
    """How a checkpoint stores its quantised matrices."""

    @property
    def name(self) -> str:
        """For messages."""

    @property
    def parts(self) -> tuple[str, ...]:
        """Tensors of a matrix, by their last names; the first holds its elements."""

    @property
    def unused(self) -> tuple[str, ...]:
        """Tensors beside them that a weight-only engine does not read."""

    def shape(self, stored: Sequence[int]) -> list[int]:
        """[O, I] of the matrix whose first part is stored in this shape."""

    def prepare(self, module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """The stored parts of a module as `widen` takes them. Raises ModelError for damaged ones."""

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[O, I] in `dtype`: the values of a matrix."""

    def half_step(self, parts: Mapping[str, Tensor]) -> Tensor:
        """float32 [O, I]: how far a value is from where the next begins. Rounding moved it by no more."""


@dataclass(frozen=True, slots=True)
class Fp8:
    """e4m3 numbers [O, I], with one scale for the matrix, for each row, or for each block."""

    name: str
    scale: str
    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: a scale for the matrix, or for each row."""
    joins: bool = False
    """On a GPU vLLM gives q, k and v, or gate and up, one scale, and rounds their numbers again to it."""
    unused: tuple[str, ...] = ("input_scale",)

    @property
    def parts(self) -> tuple[str, ...]:
        return ("weight", self.scale)

    def shape(self, stored: Sequence[int]) -> list[int]:
        return list(stored)

    def prepare(self, module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return parts

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        return parts["weight"].to(dtype) * self._scales(parts, dtype)

    def half_step(self, parts: Mapping[str, Tensor]) -> Tensor:
        import torch

        weight = parts["weight"].to(torch.float32)
        smallest = torch.tensor(2.0**-6)  # from here to 0 numbers are equally far apart
        exponents = torch.frexp(torch.maximum(weight.abs(), smallest)).exponent
        return torch.ldexp(torch.ones_like(weight), exponents - 5) * self._scales(parts, torch.float32)

    def _scales(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        """[O, I], [O, 1] or [1, 1]."""
        scale, (rows, columns) = parts[self.scale].to(dtype), parts["weight"].shape
        if self.block is None:
            return scale.reshape(-1, 1)
        return scale.repeat_interleave(self.block[0], 0)[:rows].repeat_interleave(self.block[1], 1)[
            :, :columns
        ]


@dataclass(frozen=True, slots=True)
class PackedInt:
    """compressed-tensors: rows of `bits`-bit integers in int32, and scales [O, G] of groups along a row."""

    name: str
    bits: int
    symmetric: bool
    unused: tuple[str, ...] = ("weight_shape",)

    @property
    def parts(self) -> tuple[str, ...]:
        zeros = () if self.symmetric else ("weight_zero_point",)
        return ("weight_packed", "weight_scale", *zeros)

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[0], stored[1] * 32 // self.bits]

    def prepare(self, module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return parts

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        numbers = _unpack(parts["weight_packed"], self.bits, dim=1)
        zeros = None if self.symmetric else _unpack(parts["weight_zero_point"], self.bits, dim=0)
        return _scaled(numbers, zeros, parts["weight_scale"].to(dtype), self.bits)

    def half_step(self, parts: Mapping[str, Tensor]) -> Tensor:
        return _half_scales(parts["weight_scale"], self.shape(parts["weight_packed"].shape)[1])


@dataclass(frozen=True, slots=True)
class Gptq:
    """Columns of `bits`-bit integers in int32 [I / n, O], symmetric, and scales [G, O]."""

    name: str
    bits: int
    parts: tuple[str, ...] = ("qweight", "scales")
    unused: tuple[str, ...] = ("qzeros", "g_idx")

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[1], stored[0] * 32 // self.bits]

    def prepare(self, module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return parts

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        numbers = _unpack(parts["qweight"], self.bits, dim=0).t()
        return _scaled(numbers, None, parts["scales"].to(dtype).t(), self.bits)

    def half_step(self, parts: Mapping[str, Tensor]) -> Tensor:
        return _half_scales(parts["scales"].t(), self.shape(parts["qweight"].shape)[1])


@dataclass(frozen=True, slots=True)
class Awq:
    """Rows of 4-bit integers [I, O / 8] in AWQ_ORDER, with scales and zero points [G, O]."""

    name: str
    parts: tuple[str, ...] = ("qweight", "scales", "qzeros")
    unused: tuple[str, ...] = field(default=())

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[1] * 8, stored[0]]

    def prepare(self, module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        return parts

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        numbers, zeros = (
            _groups(_unpack(parts[part], 4, dim=1), 8)[..., AWQ_ORDER].flatten(1).t()
            for part in ("qweight", "qzeros")
        )
        return _scaled(numbers, zeros, parts["scales"].to(dtype).t(), 4)

    def half_step(self, parts: Mapping[str, Tensor]) -> Tensor:
        return _half_scales(parts["scales"].t(), self.shape(parts["qweight"].shape)[1])


@dataclass(frozen=True, slots=True)
class Bits4:
    """bitsandbytes: two 4-bit indices into a map of 16 values in each uint8, and a scale for each block.

    Nested: a scale is an index into a map of 256 values, times the scale of NESTED_BLOCK of them, plus an
    offset.
    """

    name: str
    kind: Literal["nf4", "fp4"]
    nested: bool
    unused: tuple[str, ...] = field(default=())

    @property
    def state(self) -> str:
        """The part that holds the shape, the size of a block and the offset as JSON."""
        return f"weight.quant_state.bitsandbytes__{self.kind}"

    @property
    def parts(self) -> tuple[str, ...]:
        nested = ("weight.nested_absmax", "weight.nested_quant_map") if self.nested else ()
        return ("weight", "weight.absmax", "weight.quant_map", self.state, *nested)

    def shape(self, stored: Sequence[int]) -> list[int]:
        return [stored[0], stored[1] * 2]

    def prepare(self, module: str, parts: dict[str, Tensor]) -> dict[str, Tensor]:
        """Bytes and scales in rows of the matrix, and the offset in place of the JSON."""
        state = _read_state(bytes(parts[self.state].tolist()), module, nested=self.nested)
        weight = parts["weight"].reshape(state.rows, state.columns // 2)
        scales = parts["weight.absmax"].reshape(state.rows, state.columns // state.block)
        offset = scales.new_tensor([state.offset], dtype=parts["weight.quant_map"].dtype)
        return parts | {"weight": weight, "weight.absmax": scales, self.state: offset}

    def widen(self, parts: Mapping[str, Tensor], dtype: torch.dtype) -> Tensor:
        import torch

        values, scales = parts["weight.quant_map"], self._scales(parts)
        pairs = torch.stack([values.repeat_interleave(16), values.repeat(16)], 1)  # the high half comes first
        numbers = pairs.index_select(0, parts["weight"].flatten().int())
        return numbers.view(*scales.shape, -1).mul_(scales[..., None]).flatten(1).to(dtype)

    def half_step(self, parts: Mapping[str, Tensor]) -> Tensor:
        import torch
        from torch.nn import functional

        values = parts["weight.quant_map"]
        order = values.argsort()
        gaps = values[order].diff().float()
        halves = torch.maximum(functional.pad(gaps, (1, 0)), functional.pad(gaps, (0, 1))) / 2
        return self.widen({**parts, "weight.quant_map": halves[order.argsort()]}, torch.float32)

    def _scales(self, parts: Mapping[str, Tensor]) -> Tensor:
        """float32 [O, blocks]."""
        scales = parts["weight.absmax"]
        if not self.nested:
            return scales
        values = parts["weight.nested_quant_map"].index_select(0, scales.flatten().int())
        of_scales = parts["weight.nested_absmax"].repeat_interleave(NESTED_BLOCK)[: len(values)]
        return (values * of_scales + parts[self.state]).view_as(scales)


class State(NamedTuple):
    """What bitsandbytes' JSON says about a matrix."""

    rows: int
    columns: int
    block: int
    """Elements of a row that share a scale."""
    offset: float
    """Of nested scales, else 0."""


def _read_state(data: bytes, module: str, *, nested: bool) -> State:
    """Raises ModelError for what skylite does not widen."""
    try:
        facts = parse_json(data)
        (rows, columns), block = facts["shape"], facts["blocksize"]
        found = State(rows, columns, block, float(facts["nested_offset"]) if nested else 0.0)
        nested_block = facts.get("nested_blocksize", NESTED_BLOCK)
        sizes_fit = all(type(size) is int and size > 0 for size in found[:3]) and not columns % block
        fits = sizes_fit and ("nested_offset" in facts) == nested and nested_block == NESTED_BLOCK
    except (ValueError, KeyError, TypeError) as error:
        raise ModelError(
            f"The quantised {module} has a quant_state that cannot be read: {type(error).__name__} {error}.",
            "Download the model again.",
        ) from None
    if not fits or columns % 2:
        raise ModelError(
            f"The quantised {module} has a quant_state that skylite does not widen: {str(facts)[:300]}.",
            f"Rows must be whole blocks, and scales nested by {NESTED_BLOCK} as config.json says. {REMEDY}",
        )
    return found


def read_format(settings: Mapping[str, Any], model: str) -> Format:
    """The format that a quantization_config describes. Raises ModelError for one that skylite does not read.

    `model`: for messages.
    """
    method = str(settings.get("quant_method") or "compressed-tensors")
    readers = {
        "fp8": _fp8, "compressed-tensors": _compressed_tensors, "gptq": _gptq, "awq": _awq,
        "bitsandbytes": _bitsandbytes,
    }  # fmt: skip
    if method not in readers:
        raise ModelError(
            f"The base {model} is quantised by {method[:40]}, which skylite does not read.", REMEDY
        )
    try:
        found = readers[method](settings)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise ModelError(
            f"The base {model} is quantised ({method}), and its quantization_config is not complete: "
            f"{type(error).__name__} {error}.",
            "Download the model again.",
        ) from None
    if isinstance(found, str):
        raise ModelError(f"The base {model} is quantised ({method}) {found}.", REMEDY)
    return found


def _fp8(settings: Mapping[str, Any]) -> Format | str:
    if (block := settings.get("weight_block_size")) is None:
        return Fp8("fp8", "weight_scale", None)
    return Fp8("fp8", "weight_scale_inv", (int(block[0]), int(block[1])))


def _compressed_tensors(settings: Mapping[str, Any]) -> Format | str:
    groups = list(settings["config_groups"].values())
    if len(groups) != 1:
        return f"in {len(groups)} ways at once (config_groups), and skylite reads one"
    if settings.get("kv_cache_scheme"):
        return "together with its KV cache (kv_cache_scheme), which the trainer does not have"
    weights, activations = groups[0]["weights"], groups[0].get("input_activations")
    form = groups[0].get("format") or settings.get("format")
    if (
        settings.get("transform_config")
        or settings.get("sparsity_config", {}).get("format", "dense") != "dense"
    ):
        return "with rotated or sparse weights, which skylite does not read"
    bits, kind, strategy = int(weights["num_bits"]), weights["type"], weights["strategy"]
    if (bits, kind, form) == (8, "float", "float-quantized") and strategy in ("tensor", "channel", "block"):
        block = weights.get("block_structure") if strategy == "block" else None
        return Fp8(
            f"compressed-tensors FP8, {strategy} scales",
            "weight_scale",
            None if block is None else (int(block[0]), int(block[1])),
            joins=strategy == "tensor",
        )
    if (kind, form) == ("int", "pack-quantized") and bits in (4, 8) and strategy in ("group", "channel"):
        if activations:
            return "with activations in 8 bits, which the trainer does not round"
        if weights.get("actorder") in ("group", True):
            return "with activation ordering (actorder), which vLLM no longer serves"
        return PackedInt(f"compressed-tensors INT{bits}", bits, bool(weights["symmetric"]))
    return f"as {form} with {bits}-bit {kind} weights by {strategy}, which skylite does not read"


def _gptq(settings: Mapping[str, Any]) -> Format | str:
    bits = int(settings["bits"])
    if bits not in (4, 8) or not settings["sym"]:
        return f"in {bits} bits, sym={settings['sym']}; vLLM serves 4 and 8 bits with sym=true"
    if settings.get("desc_act") and settings["group_size"] != -1:
        return "with activation ordering (desc_act), which vLLM no longer serves"
    if settings.get("dynamic"):
        return "by other rules in other modules (dynamic), which skylite does not read"
    return Gptq(f"GPTQ INT{bits}", bits)


def _awq(settings: Mapping[str, Any]) -> Format | str:
    bits, version = settings.get("bits", settings.get("w_bit")), str(settings.get("version", "gemm")).lower()
    if bits != 4 or version != "gemm" or not settings["zero_point"]:
        return (
            f"in {bits} bits, version {version}, zero_point={settings['zero_point']}; "
            "skylite reads 4 bits, gemm, with zero points"
        )
    return Awq("AWQ INT4")


def _bitsandbytes(settings: Mapping[str, Any]) -> Format | str:
    if not settings.get("load_in_4bit"):
        return "in 8 bits, whose products round activations, too, which the trainer does not"
    kind, storage = (
        settings.get("bnb_4bit_quant_type", "fp4"),
        settings.get("bnb_4bit_quant_storage", "uint8"),
    )
    if kind not in ("nf4", "fp4") or storage != "uint8":
        return f"as {kind} stored in {storage}; skylite reads nf4 and fp4 in uint8"
    return Bits4(f"bitsandbytes {kind.upper()}", kind, bool(settings.get("bnb_4bit_use_double_quant", False)))


def split_name(form: Format, name: str) -> tuple[str, str]:
    """Path of the module and name of the part, if a tensor's name can be one of a part; else (name, "")."""
    parts = (*form.parts, *form.unused)
    part = next((part for part in parts if name.endswith(f".{part}")), "")
    return (name.removesuffix(f".{part}"), part) if part else (name, "")


def quantised_modules(form: Format, names: Iterable[str]) -> set[str]:
    """Paths of the modules with quantised weights, from the names of all tensors."""
    found = (split_name(form, name) for name in names)
    return {module for module, part in found if part in form.parts and part != "weight"}


def stored_shapes(form: Format | None, model_path: Path) -> dict[str, list[int]]:
    """Shapes by name as in the files, but those of bitsandbytes' matrices as `prepare` gives them.

    Raises ModelError for a damaged file.
    """
    shapes = tensor_shapes(model_path)
    if isinstance(form, Bits4):
        for name, data in small_tensors(model_path, form.state):
            module = name.removesuffix(f".{form.state}")
            state = _read_state(data, module, nested=form.nested)
            shapes[f"{module}.weight"] = [state.rows, state.columns // 2]
    return shapes


def widened_shapes(form: Format, model_path: Path) -> dict[str, list[int]]:
    """Shapes by name as without quantisation: each matrix under its module's `weight`, and no parts."""
    shapes = stored_shapes(form, model_path)
    modules, found = quantised_modules(form, shapes), dict[str, list[int]]()
    for name, shape in shapes.items():
        module, part = split_name(form, name)
        if module not in modules or not part:
            found[name] = shape
        elif part == form.parts[0]:
            found[f"{module}.weight"] = form.shape(shape)
    return found


def stored_tensors(model_path: Path, device: str = "cpu") -> Iterator[tuple[str, Tensor]]:
    """The tensors in a model's files, one at a time. Raises ModelError for a damaged file."""
    from safetensors import safe_open

    for file in weight_files(model_path):
        with safe_open(regular(file), framework="pt", device=device) as tensors:
            yield from ((name, tensors.get_tensor(name)) for name in tensors.keys())  # noqa: SIM118


def grouped(
    form: Format, tensors: Iterable[tuple[str, Tensor]]
) -> Iterator[tuple[str, Tensor | dict[str, Tensor]]]:
    """The tensors of a checkpoint in any order, with the parts of a matrix together under its `weight`.

    Raises ModelError if a matrix lacks a part.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors:
        module, part = split_name(form, name)
        if part in form.unused:
            continue
        if not part or (part == "weight" and not any(kind in str(tensor.dtype) for kind in PACKED)):
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if len(parts) == len(form.parts):
            yield f"{module}.weight", form.prepare(module, waiting.pop(module))
    if waiting:
        module, parts = next(iter(waiting.items()))
        lacks = ", ".join(part for part in form.parts if part not in parts)
        raise ModelError(f"The quantised {module} lacks {lacks}.", "Download the model again.")


def widened(
    form: Format, tensors: Iterable[tuple[str, Tensor]], dtype: torch.dtype
) -> Iterator[tuple[str, Tensor]]:
    """The tensors of a checkpoint as without quantisation: matrices in `dtype`, the others as they are."""
    for name, value in grouped(form, tensors):
        yield name, form.widen(value, dtype) if isinstance(value, dict) else value


def _unpack(packed: Tensor, bits: int, dim: Literal[0, 1]) -> Tensor:
    """uint8: the numbers that each int32 holds along `dim`, lowest bits first."""
    import torch

    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=packed.device)
    shifts = shifts if dim else shifts[:, None]
    numbers = (packed.unsqueeze(dim + 1) >> shifts) & (2**bits - 1)
    found: Tensor = numbers.to(torch.uint8).flatten(dim, dim + 1)
    return found


def _scaled(numbers: Tensor, zeros: Tensor | None, scales: Tensor, bits: int) -> Tensor:
    """[O, I]: scale (number - zero), with numbers [O, I], zeros and scales [O, G].

    Without zeros the middle of the numbers is 0.
    """
    of_groups = _groups(numbers.to(scales.dtype), numbers.shape[1] // scales.shape[1])
    shifted = of_groups - (2 ** (bits - 1) if zeros is None else zeros.to(scales.dtype)[..., None])
    return (shifted * scales[..., None]).flatten(1)


def _half_scales(scales: Tensor, columns: int) -> Tensor:
    """float32 [O, I] of scales [O, G]."""
    return scales.float().repeat_interleave(columns // scales.shape[1], 1) / 2


def _groups(rows: Tensor, size: int) -> Tensor:
    """[O, I] as [O, I / size, size]."""
    return rows.reshape(rows.shape[0], -1, size)
