"""The frozen base: whole on a lone rank, in shards on several, each read from the files as the part that a rank holds."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from accelerate import init_empty_weights
from safetensors import SafetensorError, safe_open
from torch import Tensor, nn
from torch.distributed.fsdp import CPUOffloadPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from skylite.errors import ModelError
from skylite.model.attention_backends import register_forms
from skylite.model.distributed import Dist


def load_base(path: str, dtype: torch.dtype, dist: Dist, offload: bool) -> tuple[PreTrainedModel, str]:
    """The model of a local folder, frozen, with our attention, sharded by FSDP2 where there is a reason to; and how, in words.

    On several ranks no rank ever holds more than its shard and the layer at work. Files whose tensors are not the model's
    parameters one to one (some mixtures of experts) are loaded whole by every rank first, which is said.
    Raises ModelError when the folder is missing, damaged or incomplete.
    """
    register_forms()
    if dist.dp_size == 1 and not offload:
        # A lone rank has nobody to share with, and FSDP would hold its base twice.
        return _whole(path, dtype, dist.device), "base: whole on its one rank"
    try:
        base = _load_shards(Path(path), dtype, dist, offload)
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unloadable(path, error) from error
    how = "base: each rank read its shard of the files"
    if base is None:
        base = _whole(path, dtype, torch.device("cpu"))
        _shard(base, dist, offload)
        how = "base: read whole by every rank and sharded then, because its files' tensors are not its parameters"
    # Not base.to(device): FSDP refuses offloaded shards that are anywhere but in the machine's memory.
    for name, buffer in base.named_buffers():
        base.get_submodule(name.rpartition(".")[0])._buffers[name.rpartition(".")[2]] = buffer.to(dist.device)
    return base, f"{how}; offloaded to the machine's memory" if offload else how


def decoder_layers(model: PreTrainedModel) -> list[nn.Module]:
    """The repeated blocks of the model: the members of its longest ModuleList."""
    lists = [list(m) for m in model.modules() if isinstance(m, nn.ModuleList)]
    if not lists:
        raise ModelError(
            f"{type(model).__name__} has no list of decoder layers to shard.",
            "Use a decoder-only model of transformers.",
        )
    return max(lists, key=len)


def _whole(path: str, dtype: torch.dtype, device: torch.device) -> PreTrainedModel:
    try:
        model, info = AutoModelForCausalLM.from_pretrained(
            path,
            dtype=dtype,
            local_files_only=True,
            use_safetensors=True,
            output_loading_info=True,
            device_map={"": device},
        )
    except (OSError, ValueError, KeyError, RuntimeError, SafetensorError) as error:
        raise _unloadable(path, error) from error
    if info["missing_keys"]:
        some = ", ".join(sorted(info["missing_keys"])[:3])
        what = f"{path} lacks {len(info['missing_keys'])} weights of {type(model).__name__}: {some}."
        raise ModelError(what, "The download is incomplete; fetch it again.")
    return model


def _load_shards(path: Path, dtype: torch.dtype, dist: Dist, offload: bool) -> PreTrainedModel | None:
    """The model without weights, sharded, then filled; None where the files' names are not the parameters'."""
    config = AutoConfig.from_pretrained(path, local_files_only=True)
    with init_empty_weights(include_buffers=False):
        base: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=dtype)
    base.tie_weights()
    base.requires_grad_(False)
    files = _tensor_files(path)
    named = dict(base.named_parameters())
    if not named.keys() <= files.keys() or any(n in files for n, _ in base.named_buffers()):
        return None
    _shard(base, dist, offload)
    device = torch.device("cpu") if offload else dist.device
    filled = {
        id(p): nn.Parameter(read_shard(files[n], n, p, dtype, device, dist), False)
        for n, p in base.named_parameters()
    }
    # Tied weights are one parameter under two names, and stay one.
    state = {n: filled[id(p)] for n, p in base.named_parameters(remove_duplicate=False)}
    base.load_state_dict(state, strict=False, assign=True)
    return base.eval()


def _shard(base: PreTrainedModel, dist: Dist, offload: bool) -> None:
    """FSDP2 on each decoder layer and the root. What PEFT adds afterwards is nobody's shard: every rank holds it whole."""
    # Pinned pages are for copies to a GPU; without one torch cannot pin.
    policy = CPUOffloadPolicy(pin_memory=dist.device.type == "cuda") if offload else OffloadPolicy()
    for module in [*decoder_layers(base), base]:
        fully_shard(module, mesh=dist.mesh, reshard_after_forward=True, offload_policy=policy)


def _tensor_files(path: Path) -> dict[str, Path]:
    """Tensor name -> the safetensors file that holds it."""
    index = path / "model.safetensors.index.json"
    if index.exists():
        return {n: path / f for n, f in json.loads(index.read_text(encoding="utf-8"))["weight_map"].items()}
    file = path / "model.safetensors"
    if not file.exists():
        return {}
    with safe_open(file, framework="pt") as tensors:
        return dict.fromkeys(tensors.keys(), file)


@torch.no_grad()
def read_shard(
    file: Path, name: str, param: Tensor, dtype: torch.dtype, device: torch.device, dist: Dist
) -> DTensor:
    """This rank's rows of a stored tensor, on `device`; no other row is read. FSDP2 cuts along the first dimension as torch.chunk does.

    `param`: the sharded parameter that they are for. Raises ValueError when the stored shape is not its shape.
    """
    # Not DTensor.from_local: that moves its tensor to the mesh's device, where offloaded shards must not go.
    shard = torch.empty_like(param, dtype=dtype, device=device)
    assert isinstance(shard, DTensor)
    with safe_open(file, framework="pt") as tensors:
        stored = tensors.get_slice(name)
        if tuple(stored.get_shape()) != tuple(param.shape):
            raise ValueError(
                f"{name} has shape {stored.get_shape()} in {file.name} and {tuple(param.shape)} in the model"
            )
        rows = -(-param.shape[0] // dist.dp_size)
        start = min(dist.dp_rank * rows, param.shape[0])
        shard.to_local().copy_(stored[start : min(start + rows, param.shape[0])])
    return shard


def _unloadable(path: str, error: Exception) -> ModelError:
    what = f"{path} cannot be loaded as a causal language model: {error}"
    return ModelError(what, "Check the folder, or give another --model.")
