"""Read and check any PEFT adapter folder, and copy it into a new run as version 0 (`--from-adapter`).

model/policy.py checks tensor names and shapes, because that needs the model.
"""

from __future__ import annotations

import math
import os
import re
import shutil
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from skylite.adapters.manifest import Manifest, read_manifest
from skylite.adapters.target_modules import LM_HEADS, predict_modules, short_names
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.resolve import safetensors_header, tensor_shapes
from skylite.notes import Note, warning
from skylite.run.files import atomic_folder
from skylite.run.run_dir import RunDir, adapter_name
from skylite.untrusted_files import read_text, regular
from skylite.untrusted_text import parse_json

CONFIG, WEIGHTS, MANIFEST = "adapter_config.json", "adapter_model.safetensors", "manifest.json"
PICKLE = "adapter_model.bin"
PREFIX = "base_model.model."
"""What PEFT puts before the path of a module."""
MATRIX = re.compile(
    r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?!weight$)[^.]+)?(\.weight)?"
)
"""Name of a LoRA matrix. Some frameworks leave the adapter's name in it, as in lora_A.default.weight."""
MERGE = (
    "skylite trains and serves only plain LoRA. Merge the adapter into its base with PEFT (merge_and_unload, "
    "save_pretrained, and the tokenizer beside it), and start from that model."
)
PLAIN_ONLY = "skylite trains and serves only plain LoRA."
UNSUPPORTED_KEYS = {
    "use_dora": "it is a DoRA adapter",
    "lora_bias": "it has trained biases",
    "modules_to_save": "it has fully trained modules",
    "layer_replication": "it repeats layers",
    "target_parameters": "it adapts parameters and not modules",
    "trainable_token_indices": "it has trained token embeddings",
    "alora_invocation_tokens": "it is an activated LoRA",
    "use_qalora": "it is a QALoRA adapter",
}
"""Keys of adapter_config.json that must be empty or false, with the reason for the error message."""
PATTERNS = {
    "rank_pattern": ("r", "its ranks differ from layer to layer"),
    "alpha_pattern": ("lora_alpha", "its alphas differ from layer to layer"),
}
"""Keys of adapter_config.json with values of single modules, which must be those of all."""
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
    shapes: dict[str, list[int]]
    """Shape of each matrix, by PEFT's name."""
    odd_name: str | None
    """A name of a matrix that engines do not read; None if they read all."""
    manifest: Manifest | None
    """None for an adapter that skylite did not publish."""


def adopt_adapter(
    config: TrainConfig, chosen: Collection[str], model_path: Path
) -> tuple[TrainConfig, list[str]]:
    """The settings with rank, alpha, scaling and modules of lora.from_adapter, and a note on the changes.

    `chosen`: settings that the user chose, such as "lora.rank"; ConfigError if they differ from the adapter.
    ModelError if the adapter cannot be used.
    """
    lora = config.lora
    if lora.from_adapter is None:
        return config, []
    found = read_warm_start(expand_adapter_path(lora.from_adapter))
    has = {"rank": found.rank, "alpha": found.alpha, "use_rslora": found.use_rslora}
    if found.alpha == 0 and "lora.alpha" in chosen:  # verl wrote 0 where its own setting says more
        has["alpha"] = lora.alpha
    fixed = {name: value for name, value in has.items() if f"lora.{name}" in chosen}
    if differing := [name for name in fixed if getattr(lora, name) != has[name]]:
        difference = "; ".join(
            f"{name} {_format_value(has[name])}, but this run uses {_format_value(getattr(lora, name))}"
            for name in differing
        )
        raise ConfigError(
            f"The adapter {found.folder} has {difference}.",
            "Leave out those settings: skylite takes them from the adapter.",
        )
    if not has["alpha"] > 0:
        raise ModelError(
            f"The adapter {found.folder} has lora_alpha {found.alpha:g}, under which it changes nothing. "
            "Some versions of verl write 0 by mistake.",
            "Give --alpha with the value of its training (verl: actor_rollout_ref.model.lora_alpha).",
        )
    adapted = _adapted_paths(found, model_path)
    update: dict[str, Any] = {**has, **_targets(lora, chosen, adapted, found.folder, model_path)}
    try:
        fresh = LoraConfig.model_validate(lora.model_dump() | update)
    except ValidationError as error:
        raise ModelError(
            f"The adapter {found.folder} cannot be used: {error.errors()[0]['msg']}", MERGE
        ) from None
    changed = [name for name in update if getattr(fresh, name) != getattr(lora, name)]
    notes = [f"from the adapter: {', '.join(f'lora.{n}={getattr(fresh, n)}' for n in changed)}"]
    return config.model_copy(update={"lora": fresh}), notes if changed else []


def check_warm_start(config: TrainConfig, model_path: Path, fingerprint: str) -> list[Note]:
    """Check lora.from_adapter against the base model. Returns notes on it.

    Raises ConfigError or ModelError.
    """
    assert config.lora.from_adapter is not None, "the caller checks this"
    found = read_warm_start(expand_adapter_path(config.lora.from_adapter))
    notes = [Note(text) for text in check_base_model(found, config.model.name, model_path, fingerprint)]
    version = (
        adapter_name(found.manifest.version) if found.manifest is not None else "not published by skylite"
    )
    alpha = config.lora.alpha
    notes.append(Note(f"warm start from {found.folder} (rank {found.rank}, alpha {alpha:g}, {version})"))
    if config.pulls_to_base:
        notes.append(
            warning(
                "algorithm.kl_ref=base pulls a warm start back to the base model; "
                "set it to init to stay near the warm start"
            )
        )
    return notes


def read_warm_start(folder: Path) -> WarmStart:
    """Read an adapter folder and check that it holds intact, plain LoRA weights.

    With a manifest, also checks their hash. Raises ModelError.
    """
    _require_files(folder)
    peft = _plain_lora(folder)
    rank, shapes = peft["r"], _lora_shapes(folder / WEIGHTS)
    if (found := {_rank_of(name, shape) for name, shape in shapes.items()}) != {rank}:
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
        shapes=shapes,
        odd_name=next((n for n in _shapes(folder / WEIGHTS) if not usual_name(n).endswith(n)), None),
        manifest=read_manifest(folder) if (folder / MANIFEST).is_file() else None,
    )


def usual_name(tensor: str) -> str:
    """PEFT's name of a LoRA matrix: with its prefix, without the name of an adapter."""
    match = MATRIX.fullmatch(tensor)
    if match is None:
        return tensor
    path, embedding, side = match["path"], match["embedding"] or "", match["side"]
    prefix = "" if path.startswith(PREFIX) else PREFIX
    return f"{prefix}{path}.lora_{embedding}{side}{'' if embedding else '.weight'}"


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

    Raises ModelError for a damaged copy, WriteFailed.
    """
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


def _require_files(folder: Path) -> None:
    """Raise ModelError, with what to do, unless the folder has an adapter's two files."""
    what, example = f"{folder} is not an adapter folder", "RUN/adapters/policy-v000060"
    if not folder.is_dir():
        hint = f"Give a folder saved by skylite or PEFT, e.g. {example}."
        if re.fullmatch(r"[\w.-]+/[\w.-]+", str(folder)):
            hint += f" From the hub: `hf download {folder} --local-dir FOLDER`, and give FOLDER."
        raise ModelError(f"{what}: {CONFIG} is missing.", hint)
    if not (folder / CONFIG).is_file():
        inner = sorted(path.parent.name for path in folder.glob(f"*/{CONFIG}"))
        hint = f"Give a folder saved by skylite or PEFT, e.g. {example}."
        if inner:
            hint = (
                f"It holds {', '.join(inner)}: give one of them, such as --from-adapter {folder / inner[0]}."
            )
        raise ModelError(f"{what}: {CONFIG} is missing.", hint)
    if not (folder / WEIGHTS).is_file():
        hint = f"Give a folder saved by skylite or PEFT, e.g. {example}."
        if (folder / PICKLE).is_file():
            hint = (
                f"skylite reads no pickles ({PICKLE}), which may hold code. If you trust it, convert it "
                'there: python -c "import torch as t, safetensors.torch as s; s.save_file({k: v.contiguous() '
                f"for k, v in t.load('{PICKLE}', weights_only=True, map_location='cpu').items()}}, "
                f"'{WEIGHTS}')\""
            )
        raise ModelError(f"{what}: {WEIGHTS} is missing.", hint)


def _adapted_paths(found: WarmStart, model_path: Path) -> set[str]:
    """The modules that the adapter changes. Raises ModelError unless they are the model's, of its shapes."""
    adapted, shapes = set(), tensor_shapes(model_path)
    for name, shape in found.shapes.items():
        match = MATRIX.fullmatch(name)
        assert match is not None, "the names were read with it"
        path, is_a = match["path"].removeprefix(PREFIX), match["side"] == "A"
        if path.rpartition(".")[2] in LM_HEADS:
            raise ModelError(
                f"The adapter {found.folder} has LoRA on the LM head ({path}), which engines leave out of "
                "prompt log-probabilities, so no adapter could be verified.",
                "Train it without the head (Tinker: train_unembed=False), or merge it into its base with "
                "PEFT's merge_and_unload and start from that model.",
            )
        weight = shapes.get(f"{path}.weight")
        if weight is None:
            raise ModelError(
                f"The adapter {found.folder} changes {path}, which {model_path.name} does not have.",
                "Set --model to the adapter's own base model.",
            )
        if shape[1 if is_a else 0] not in weight:
            raise ModelError(
                f"The adapter {found.folder} has {name} {shape}, and that module of {model_path.name} is "
                f"{weight}.",
                "Set --model to the adapter's own base model.",
            )
        adapted.add(path)
    return adapted


def _targets(
    lora: LoraConfig, chosen: Collection[str], adapted: set[str], adapter: Path, model_path: Path
) -> dict[str, Any]:
    """lora.target_modules and exclude_modules under which a run trains exactly the adapter's modules."""
    modules, planned = predict_modules(model_path, lora)
    if planned == adapted:
        return {}
    if named := [n for n in ("target_modules", "exclude_modules") if f"lora.{n}" in chosen]:
        less, more = sorted(adapted - planned), sorted(planned - adapted)
        difference = f"leaves out {less[0]}" if less else f"adds {more[0]}"
        raise ConfigError(
            f"lora.{named[0]}={getattr(lora, named[0])!r} {difference}, unlike the adapter {adapter}.",
            "Leave out that setting: skylite takes the modules from the adapter.",
        )
    every = LoraConfig()
    if predict_modules(model_path, every)[1] == adapted:
        return {"target_modules": every.target_modules, "exclude_modules": []}
    return {"target_modules": short_names(modules, adapted), "exclude_modules": []}


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
        if not math.isfinite(peft["lora_alpha"]):
            raise ValueError(f"lora_alpha is {peft['lora_alpha']}")
    except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
        raise ModelError(
            f"{path} is not a PEFT LoRA configuration: {type(error).__name__} {error}.",
            "Give a folder saved by PEFT.",
        ) from None
    if kind != "LORA":
        reasons.insert(0, f"its peft_type is {kind}")
    if peft.get("bias", "none") != "none":
        reasons.append("it has trained biases")
    changed_base = str(peft.get("init_lora_weights")).lower().startswith(CHANGED_BASE)
    if changed_base:
        reasons.append(
            f"init_lora_weights={peft['init_lora_weights']} fits a changed base model "
            "(PEFT can convert it on saving)"
        )
    patterns = {key: peft.get(key) or {} for key in PATTERNS}
    reasons += [
        reason
        for key, (value, reason) in PATTERNS.items()
        if any(other != peft[value] for other in _values(patterns[key]))
    ]
    if reasons:
        is_plain = kind == "LORA" and not changed_base
        raise ModelError(
            f"The adapter {folder} cannot be used: {'; '.join(reasons)}.", MERGE if is_plain else PLAIN_ONLY
        )
    plain: dict[str, Any] = peft
    return plain


def _names(modules: Any) -> list[str] | None:
    if modules is None or isinstance(modules, str):
        return None
    if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
        raise TypeError(f"target_modules is {modules!r:.80}")
    return modules


def _values(pattern: Any) -> list[Any]:
    return list(pattern.values()) if isinstance(pattern, dict) else [pattern]


def _lora_shapes(path: Path) -> dict[str, list[int]]:
    """Shape of each LoRA matrix in a file, by PEFT's name, read from its header. Raises ModelError."""
    shapes = {}
    for name, shape in _shapes(path).items():
        if MATRIX.fullmatch(name) is None or len(shape) != 2:
            raise ModelError(f"{path} contains {name} {shape}, which is not a LoRA matrix.", MERGE)
        if (usual := usual_name(name)) in shapes:
            raise ModelError(f"{path} has {usual} twice.", "Save the adapter alone in that folder.")
        shapes[usual] = shape
    return shapes


def _rank_of(name: str, shape: Sequence[int]) -> int:
    match = MATRIX.fullmatch(name)
    return shape[0 if match is not None and match["side"] == "A" else 1]


def _shapes(path: Path) -> dict[str, list[int]]:
    """Shape of every tensor, read by the library that trainer and engine use. Raises ModelError."""
    from safetensors import SafetensorError, safe_open

    safetensors_header(path)  # has a better error message for a truncated file
    try:
        with safe_open(regular(path), framework="numpy") as tensors:
            return {name: tensors.get_slice(name).get_shape() for name in tensors.keys()}  # noqa: SIM118 -- not a dict
    except (OSError, SafetensorError) as error:
        raise ModelError(f"{path} cannot be read: {error}.", "The folder is damaged.") from None


def _format_value(value: float | bool) -> str:
    return str(value).lower() if isinstance(value, bool) else f"{value:g}"
