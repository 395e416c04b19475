"""Loads the frozen base model: full on a single rank or on each, or sharded by FSDP2 on several."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, PreTrainedModel

from skylite.errors import ModelError
from skylite.hub.quantised import Format, stored_tensors
from skylite.hub.text_model import auto_class, quantised_format
from skylite.model.attention_backends import register_backends
from skylite.model.process_group import Dist
from skylite.model.quantised_weights import fill_quantised
from skylite.untrusted_files import read_text, regular
from skylite.untrusted_text import parse_json


def load_base(
    path: str, dtype: torch.dtype, dist: Dist, offload: bool, replicate: bool = False
) -> tuple[PreTrainedModel, str]:
    """Load the frozen model of a local folder, with skylite's tree attention registered.

    A single rank holds the full model. On several ranks, unless they `replicate` it, each rank reads its own
    shard, and holds no more than that and the layer that it computes. In most mixtures of experts the tensors
    in the files are not the model's parameters one to one. Then rank 0 loads the full model into CPU memory
    and sends the other ranks theirs. A quantised model stays quantised (model/quantised_weights.py), in full
    on every rank.

    Args:
        path: folder with config and safetensors.
        dtype: compute dtype of the weights.
        dist: this rank; all ranks call this function.
        offload: keep the shards in CPU memory.
        replicate: every rank holds the full model.

    Returns:
        The model, and a sentence for the log that says how it was loaded.

    Raises:
        ModelError: the folder is missing, damaged or incomplete.
    """
    register_backends()
    try:
        form = quantised_format(Path(path))
    except (OSError, ValueError) as error:
        raise _load_error(path, error) from error
    if form is not None:
        return _load_quantised(Path(path), form, dtype, dist.device), f"base model: {form.name}, kept so"
    if (dist.dp_size == 1 or replicate) and not offload:
        # FSDP on a single rank would hold the base twice.
        where = "a single rank" if dist.dp_size == 1 else "each rank"
        return _load_full(path, dtype, dist.device), f"base model: full on {where}"
    try:
        base = _load_shards(Path(path), dtype, dist, offload)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _load_error(path, error) from error
    how = "base model: each rank read its shard"
    if base is None:
        base = _share_full_model(path, dtype, dist, offload)
        how = (
            "base model: rank 0 read the full model and sent each rank its shard, "
            "because the tensors in its files are not its parameters"
        )
    _move_buffers(base, dist.device)  # not base.to: FSDP accepts offloaded shards only in CPU memory
    return base, f"{how}; offloaded to CPU memory" if offload else how


def text_path(model: PreTrainedModel) -> str:
    """Path of the text model in a model that also reads pictures or sound; "" for a model of text alone."""
    if model.config.get_text_config() is model.config:
        return ""
    decoder = model.get_decoder()
    return next(str(name) for name, module in model.named_modules() if module is decoder)


def text_model(model: PreTrainedModel) -> nn.Module:
    """The module at `text_path`."""
    found: nn.Module = model.get_submodule(text_path(model))
    return found


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The decoder layers: the members of the text model's longest ModuleList.

    Raises ModelError if it has none.
    """
    lists = [list(m) for m in text_model(model).modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers to shard.",
            "Use a decoder-only model of transformers.",
        )
    return max(lists, key=len)


def _load_full(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
        model, info = auto_class(config).from_pretrained(
            path,
            config=config,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            trust_remote_code=False,
            output_loading_info=True,
            device_map={"": device},
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _load_error(path, error) from error
    if info["missing_keys"]:
        examples = ", ".join(sorted(info["missing_keys"])[:3])
        what = f"{path} lacks {len(info['missing_keys'])} weights of {type(model).__name__}: {examples}."
        raise ModelError(what, "The download is incomplete; download it again.")
    return model


def _load_quantised(path: Path, form: Format, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        base = _empty_model(path, dtype)
        fill_quantised(base, form, stored_tensors(path, str(device)), dtype, device)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _load_error(str(path), error) from error
    _move_buffers(base, device)
    return base.eval()


def _move_buffers(base: PreTrainedModel, device: torch.device) -> None:
    for name, buffer in base.named_buffers():
        base.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(device)


def _load_shards(path: Path, dtype: torch.dtype, dist: Dist, offload: bool) -> PreTrainedModel | None:
    """Build the model without weights, shard it, then read the shards.

    Returns None if the names of the stored tensors are not those of the parameters.
    """
    base = _empty_model(path, dtype)
    files = _tensor_files(path)
    named = dict(base.named_parameters())
    if not named.keys() <= files.keys() or any(n in files for n, _ in base.named_buffers()):
        return None
    _shard(base, dist, offload)
    device = torch.device("cpu") if offload else dist.device
    return _with_shards(
        base, {n: read_shard(files[n], n, p, dtype, device, dist) for n, p in base.named_parameters()}
    )


def _share_full_model(path: str, dtype: torch.dtype, dist: Dist, offload: bool) -> PreTrainedModel:
    """Load the full model on rank 0, in CPU memory, and give each rank its shard.

    One tensor at a time: the other ranks hold no more than their shards and one tensor.
    """
    full = _load_full(path, dtype, torch.device("cpu")) if dist.is_main else None
    base = _empty_model(Path(path), dtype)
    _shard(base, dist, offload)
    device, shards = torch.device("cpu") if offload else dist.device, dict[str, DTensor]()
    for name, param in base.named_parameters():
        unsharded = torch.empty(param.shape, dtype=dtype, device=dist.device)
        if full is not None:
            stored = full.get_parameter(name)
            unsharded.copy_(stored)
            stored.data = stored.new_empty(0)  # rank 0 holds the model once, not twice
        shards[name] = _shard_of(param, dist.broadcast_(unsharded).__getitem__, dtype, device, dist)
    for name, buffer in base.named_buffers():
        value = torch.empty_like(buffer, device=dist.device)
        value.copy_(buffer if full is None else full.get_buffer(name))
        buffer.copy_(dist.broadcast_(value))
    return _with_shards(base, shards)


def _empty_model(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of a folder's config, without memory for its frozen weights."""
    config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    with init_empty_weights(include_buffers=False):
        base: PreTrainedModel = auto_class(config).from_config(config, dtype=dtype, trust_remote_code=False)
    base.tie_weights()
    base.requires_grad_(False)
    return base


def _with_shards(base: PreTrainedModel, shards: Mapping[str, DTensor]) -> PreTrainedModel:
    """The sharded model with these as its weights."""
    loaded = {id(p): nn.Parameter(shards[n], False) for n, p in base.named_parameters()}
    # Tied weights are one parameter under two names and must stay one.
    state = {n: loaded[id(p)] for n, p in base.named_parameters(remove_duplicate=False)}
    base.load_state_dict(state, strict=False, assign=True)
    return base.eval()


def _shard(base: PreTrainedModel, dist: Dist, offload: bool) -> None:
    """Apply FSDP2 to each decoder layer and the root.

    PEFT adds the LoRA matrices afterwards, so they are not sharded: every rank holds them in full.
    """
    # Pinned memory speeds up copies to a GPU; without a GPU torch cannot pin.
    policy = CPUOffloadPolicy(pin_memory=dist.device.type == "cuda") if offload else OffloadPolicy()
    for module in [*decoder_layers(base), base]:
        fully_shard(module, mesh=dist.mesh, reshard_after_forward=True, offload_policy=policy)


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file with that tensor."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return {n: path / f for n, f in parse_json(read_text(index))["weight_map"].items()}
    file = path / "model.safetensors"
    if not file.exists():
        return {}
    with safe_open(regular(file), framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


def read_shard(
    file: Path, name: str, param: Tensor, dtype: torch.dtype, device: torch.device, dist: Dist
) -> DTensor:
    """Read this rank's rows of the tensor `name` onto `device`; other rows are not read.

    `param` is the sharded parameter to read for. Raises ValueError if the stored shape is not its shape.
    """
    with safe_open(regular(file), framework="pt") as tensors:
        stored = tensors.get_slice(name)
        if tuple(stored.get_shape()) != tuple(param.shape):
            raise ValueError(
                f"{name} has shape {stored.get_shape()} in {file.name} and {tuple(param.shape)} in the model"
            )
        return _shard_of(param, stored.__getitem__, dtype, device, dist)


@torch.no_grad()
def _shard_of(
    param: Tensor, rows_of: Callable[[slice], Tensor], dtype: torch.dtype, device: torch.device, dist: Dist
) -> DTensor:
    """This rank's shard of `param`, on `device`. FSDP2 splits the first dimension as torch.chunk does."""
    # Not DTensor.from_local: it moves the tensor to the mesh's device, but offloaded shards stay on the CPU.
    shard = torch.empty_like(param, dtype=dtype, device=device)
    assert isinstance(shard, DTensor)
    rows = -(-param.shape[0] // dist.dp_size)
    start = min(dist.dp_rank * rows, param.shape[0])
    shard.to_local().copy_(rows_of(slice(start, min(start + rows, param.shape[0]))))
    return shard


def _load_error(path: str, error: Exception) -> ModelError:
    reason = str(error).partition("\nModel type should be one of")[0]  # 150 names follow
    what = f"{path} cannot be loaded as a causal language model: {reason}"
    return ModelError(what, "Check the folder, or choose another --model.")
