"""Read and check any PEFT adapter folder, and copy it into a new run as version 0 (`--from-adapter`).

model/load_adapter.py checks tensor names and shapes, because that needs the model.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.adapters.manifest import Manifest, read_manifest
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.resolve import safetensors_header
from skylite.run.files import atomic_folder
from skylite.run.run_dir import RunDir, adapter_name
from skylite.untrusted_files import read_text, regular
from skylite.untrusted_text import parse_json

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "manifest.json"
UNSUPPORTED_KEYS = {
    "use_dora": "it is a DoRA adapter",
    "lora_bias": "it has trained biases",
    "modules_to_save": "it has fully trained modules",
    "rank_pattern": "its ranks differ from layer to layer",
    "alpha_pattern": "its alphas differ from layer to layer",
    "layer_replication": "it repeats layers",
    "target_parameters": "it adapts parameters and not modules",
    "trainable_token_indices": "it has trained token embeddings",
    "alora_invocation_tokens": "it is an activated LoRA",
    "use_qalora": "it is a QALoRA adapter",
}
"""Keys of adapter_config.json that must be empty or false, with the reason for the error message."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Values of init_lora_weights that change the base weights: the adapter does not fit the original base."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A checked adapter folder."""

    folder: Path
    rank: int
    alpha: float
    use_rslora: bool
    base_model: str
    """Name or folder recorded in the adapter."""
    target_modules: list[str] | None
    """Module names; None when the adapter has a pattern or nothing instead."""
    manifest: Manifest | None
    """None for an adapter that skylite did not publish."""


def check_warm_start(config: TrainConfig, model_path: Path, fingerprint: str) -> list[str]:
    """Check lora.from_adapter against settings and base model. Returns notes on it.

    Raises ConfigError or ModelError.
    """
    assert config.lora.from_adapter is not None, "the caller checks this"
    found = read_warm_start(expand_adapter_path(config.lora.from_adapter))
    check_lora_settings(found, config.lora)
    notes = check_base_model(found, config.model.name, model_path, fingerprint)
    version = (
        adapter_name(found.manifest.version) if found.manifest is not None else "not published by skylite"
    )
    notes.append(f"warm start from {found.folder} (rank {found.rank}, alpha {found.alpha:g}, {version})")
    if config.algorithm.uses_ref and config.algorithm.kl_ref == "base":
        notes.append(
            "warning: algorithm.kl_ref=base pulls a warm start back to the base model; "
            "set it to init to stay near the warm start"
        )
    return notes


def read_warm_start(folder: Path) -> WarmStart:
    """Read an adapter folder and check that it holds intact, plain LoRA weights.

    With a manifest, also checks their hash. Raises ModelError.
    """
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} is not an adapter folder: {name} is missing.",
                "Give a folder saved by skylite or PEFT, e.g. RUN/adapters/policy-v000060.",
            )
    peft = _plain_lora(folder)
    rank = peft["r"]
    if (found := _tensor_ranks(folder / WEIGHTS)) != {rank}:
        raise ModelError(
            f"{folder / WEIGHTS} has matrices of rank {sorted(found)}, but its {CONFIG} says {rank}.",
            "The folder is damaged.",
        )
    return WarmStart(
        folder=folder.resolve(),
        rank=rank,
        alpha=peft["lora_alpha"],
        use_rslora=bool(peft.get("use_rslora")),
        base_model=str(peft.get("base_model_name_or_path")),
        target_modules=peft["target_modules"],
        manifest=read_manifest(folder) if (folder / MANIFEST).is_file() else None,
    )


def check_lora_settings(found: WarmStart, lora: LoraConfig) -> None:
    """Check that the run uses the rank and scale that the adapter was trained with.

    Raises ConfigError with both values and the flags to set.
    """
    has = {"rank": float(found.rank), "alpha": found.alpha, "use_rslora": found.use_rslora}
    wants = {"rank": float(lora.rank), "alpha": lora.alpha, "use_rslora": lora.use_rslora}
    if differing := [k for k in has if has[k] != wants[k]]:
        difference = "; ".join(
            f"{k} {_format_value(has[k])}, but this run uses {_format_value(wants[k])}" for k in differing
        )
        rslora = (
            f" --set lora.use_rslora={_format_value(found.use_rslora)}" if "use_rslora" in differing else ""
        )
        raise ConfigError(
            f"The adapter {found.folder} has {difference}.",
            f"Give --rank {found.rank} --alpha {found.alpha:g}{rslora}.",
        )


def check_base_model(found: WarmStart, model_name: str, model_path: Path, fingerprint: str) -> list[str]:
    """Raise ConfigError when the manifest names another base model.

    Without a manifest, another name only gives a note, because the path of a model differs between machines.
    """
    if found.manifest is not None and found.manifest.base_fingerprint != fingerprint:
        raise ConfigError(
            f"The adapter {found.folder} was trained on {found.manifest.base_model} "
            f"(fingerprint {found.manifest.base_fingerprint[:12]}), but this run's model is {model_name} "
            f"(fingerprint {fingerprint[:12]}).",
            "Set --model to the base model of the adapter, with the same tokenizer and chat template.",
        )
    if found.manifest is None and found.base_model not in (model_name, str(model_path)):
        return [
            f"the adapter names the base model {found.base_model}, and this run uses {model_name}: "
            "assuming that they are the same"
        ]
    return []


def copy_warm_start(source: Path, run: RunDir) -> None:
    """Copy the adapter into the run atomically.

    Raises ConfigError when the run already has one, ModelError for a damaged copy, WriteFailed.
    """
    if run.warm_start.exists():
        raise ConfigError(
            f"{run.warm_start} already exists, from an interrupted start.",
            "Remove it, or choose another --run folder.",
        )
    with atomic_folder(run.warm_start, warm_start_bytes(source)) as folder:
        for file in _files(source):
            shutil.copyfile(file, folder / file.name)
        read_warm_start(folder)


def expand_adapter_path(from_adapter: str) -> Path:
    """Expand ~ in lora.from_adapter. Path.expanduser would raise for names that no file can have."""
    return Path(os.path.expanduser(from_adapter))


def warm_start_bytes(source: Path) -> int:
    """Size in bytes of the copy that a run makes."""
    return sum(file.stat().st_size for file in _files(source))


def _files(source: Path) -> list[Path]:
    return [path for name in (CONFIG, WEIGHTS, MANIFEST) if (path := source / name).is_file()]


def _plain_lora(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of plain LoRA. Raises ModelError for any other kind.

    In the result "r" is an int, "lora_alpha" a float, and "target_modules" a list of names or None.
    """
    path = folder / CONFIG
    try:
        peft = parse_json(read_text(path))
        kind, reasons = (
            str(peft["peft_type"]),
            [reason for key, reason in UNSUPPORTED_KEYS.items() if peft.get(key)],
        )
        peft |= {
            "r": int(peft["r"]),
            "lora_alpha": float(peft["lora_alpha"]),
            "target_modules": _names(peft.get("target_modules")),
        }
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"{path} is not a PEFT LoRA configuration: {type(error).__name__} {error}.",
            "Give a folder saved by PEFT.",
        ) from None
    if kind != "LORA":
        reasons.insert(0, f"its peft_type is {kind}")
    if peft.get("bias", "none") != "none":
        reasons.append("it has trained biases")
    if str(peft.get("init_lora_weights")).lower().startswith(CHANGED_BASE):
        reasons.append(
            f"init_lora_weights={peft['init_lora_weights']} fits a changed base model "
            "(PEFT can convert it on saving)"
        )
    if reasons:
        raise ModelError(
            f"The adapter {folder} cannot be used: {'; '.join(reasons)}.",
            "skylite trains and serves only plain LoRA.",
        )
    plain: dict[str, Any] = peft
    return plain


def _names(modules: Any) -> list[str] | None:
    if modules is None or isinstance(modules, str):
        return None
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise TypeError(f"target_modules is {modules!r:.80}")
    return modules


def _tensor_ranks(path: Path) -> set[int]:
    """The ranks of the LoRA matrices in a file, read from its header."""
    ranks = set()
    for name, shape in _shapes(path).items():
        is_a, is_b = (
            ".lora_A." in name or ".lora_embedding_A" in name,
            ".lora_B." in name or ".lora_embedding_B" in name,
        )
        if not (is_a or is_b) or len(shape) != 2:
            raise ModelError(
                f"{path} contains {name} {shape}, which is not a LoRA matrix.",
                "skylite trains and serves only plain LoRA.",
            )
        ranks.add(shape[0 if is_a else 1])
    return ranks


def _shapes(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor, read by the same library as in vLLM and the trainer. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    safetensors_header(path)  # has a better error message for a truncated file
    try:
        with safe_open(regular(path), framework="numpy") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 -- not a dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The folder is damaged.") from None


def _format_value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
