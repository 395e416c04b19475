"""Adapter folders from anywhere, read and checked; and `--from-adapter`: such a one as version 0 of a new run, copied into it.

Names and shapes are checked where the model is: model/warm_start.py.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
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
"""Keys of adapter_config.json that must be empty or false, and what else the adapter is."""
CHANGED_BASE = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Initialisations that take their start out of the base weights: without converting, the adapter fits a changed base only."""


@dataclass(frozen=True, slots=True, kw_only=True)
class WarmStart:
    """A checked adapter folder."""

    folder: Path
    rank: int
    alpha: float
    use_rslora: bool
    base_model: str
    """Name or folder, as the adapter has it."""
    target_modules: list[str] | None
    """Module names; None where the adapter gives a pattern, or nothing."""
    manifest: Manifest | None
    """None for an adapter that skylite has not published."""


def check_warm_start(
    config: TrainConfig, model_path: Path, fingerprint: str, note: Callable[[str], None]
) -> None:
    """Check lora.from_adapter against settings and base model, and say what it is. Raises ConfigError or ModelError in words."""
    assert config.lora.from_adapter is not None, "checked by the caller"
    found = read_warm_start(expand_adapter_path(config.lora.from_adapter))
    check_lora_settings(found, config.lora)
    check_base_model(found, config.model.name, model_path, fingerprint, note)
    version = adapter_name(found.manifest.version) if found.manifest is not None else "not of skylite"
    note(f"warm start from {found.folder} (rank {found.rank}, alpha {found.alpha:g}, {version})")
    if config.algorithm.uses_ref and config.algorithm.kl_ref == "base":
        note(
            "warning: algorithm.kl_ref=base pulls a warm start back to the base model; init would hold it near its own start"
        )


def read_warm_start(folder: Path) -> WarmStart:
    """An adapter folder whose files are whole and hold plain LoRA, with a manifest those it names by hash. Raises ModelError."""
    for name in (CONFIG, WEIGHTS):
        if not (folder / name).is_file():
            raise ModelError(
                f"{folder} is no adapter folder: {name} is missing.",
                "Give one saved by skylite or PEFT, e.g. RUN/adapters/policy-v000060.",
            )
    peft = _plain_lora(folder)
    rank = peft["r"]
    if (found := _tensor_ranks(folder / WEIGHTS)) != {rank}:
        raise ModelError(
            f"{folder / WEIGHTS} has matrices of rank {sorted(found)}, its {CONFIG} says {rank}.",
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
    """The matrices go on with the rank and the scale they were trained with. Raises ConfigError that names both and the flags."""
    has = {"rank": float(found.rank), "alpha": found.alpha, "use_rslora": found.use_rslora}
    wants = {"rank": float(lora.rank), "alpha": lora.alpha, "use_rslora": lora.use_rslora}
    if differing := [k for k in has if has[k] != wants[k]]:
        said = ", ".join(
            f"{k} {_format_value(has[k])}, and this run {_format_value(wants[k])}" for k in differing
        )
        rslora = (
            f" --set lora.use_rslora={_format_value(found.use_rslora)}" if "use_rslora" in differing else ""
        )
        raise ConfigError(
            f"The adapter {found.folder} has {said}.",
            f"Give --rank {found.rank} --alpha {found.alpha:g}{rslora}.",
        )


def check_base_model(
    found: WarmStart, model_name: str, model_path: Path, fingerprint: str, note: Callable[[str], None]
) -> None:
    """Raise ConfigError when the manifest names another base. A name alone only makes a note: a path differs between machines."""
    if found.manifest is not None and found.manifest.base_fingerprint != fingerprint:
        raise ConfigError(
            f"The adapter {found.folder} was trained on {found.manifest.base_model} (fingerprint {found.manifest.base_fingerprint[:12]}), "
            f"and this run's model is {model_name} (fingerprint {fingerprint[:12]}).",
            "Give --model the adapter's own base model.",
        )
    if found.manifest is None and found.base_model not in (model_name, str(model_path)):
        note(
            f"the adapter names the base model {found.base_model}, and this run's is {model_name}: taken for the same"
        )


def copy_warm_start(source: Path, run: RunDir) -> None:
    """Copy the adapter into the run, whole or not at all. Raises ConfigError when there is one already, ModelError for a damaged copy."""
    if run.warm_start.exists():
        raise ConfigError(
            f"{run.warm_start} exists already, from a start that did not end.",
            "Remove it, or choose another --run folder.",
        )
    with atomic_folder(run.warm_start, warm_start_bytes(source)) as folder:
        for file in _files(source):
            shutil.copyfile(file, folder / file.name)
        read_warm_start(folder)


def expand_adapter_path(from_adapter: str) -> Path:
    """Of lora.from_adapter; Path.expanduser raises for names that no file can have."""
    return Path(os.path.expanduser(from_adapter))


def warm_start_bytes(source: Path) -> int:
    """Of the run's copy."""
    return sum(file.stat().st_size for file in _files(source))


def _files(source: Path) -> list[Path]:
    return [path for name in (CONFIG, WEIGHTS, MANIFEST) if (path := source / name).is_file()]


def _plain_lora(folder: Path) -> dict[str, Any]:
    """adapter_config.json of plain LoRA; "r" is an int, "lora_alpha" a float, "target_modules" names or None."""
    path = folder / CONFIG
    try:
        peft = json.loads(path.read_text(encoding="utf-8"))
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
            f"init_lora_weights={peft['init_lora_weights']} fits a changed base model (PEFT converts it on saving)"
        )
    if reasons:
        raise ModelError(
            f"The adapter {folder} cannot be used: {'; '.join(reasons)}.",
            "Only plain LoRA is trained and served.",
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
    """The ranks of the LoRA matrices of a file, out of its header."""
    ranks = set()
    for name, shape in _shapes(path).items():
        is_a, is_b = (
            ".lora_A." in name or ".lora_embedding_A" in name,
            ".lora_B." in name or ".lora_embedding_B" in name,
        )
        if not (is_a or is_b) or len(shape) != 2:
            raise ModelError(
                f"{path} holds {name} {shape}, which is no LoRA matrix.",
                "Only plain LoRA is trained and served.",
            )
        ranks.add(shape[0 if is_a else 1])
    return ranks


def _shapes(path: Path) -> dict[str, list[int]]:
    """Of every tensor, by the library that vLLM and the trainer will read the file with. Raises ModelError when it would refuse."""
    from safetensors import SafetensorError, safe_open

    safetensors_header(path)  # says more of a file that is cut short
    try:
        with safe_open(path, framework="numpy") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 it is no dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The folder is damaged.") from None


def _format_value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
