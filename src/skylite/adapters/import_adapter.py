"""Read and check any PEFT adapter folder, and copy it into a new run as version 0 (`--from-adapter`).

model/policy.py checks tensor names and shapes, because that needs the model.
"""

from __future__ import annotations

import json
import math
import os
import re
import shutil
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from skylite.adapters.experts import BASE_LAYER, ExpertSizes, expert_layers, is_experts, module_of
from skylite.adapters.manifest import Manifest, read_manifest
from skylite.adapters.target_modules import (
    EXPERTS,
    LM_HEADS,
    pattern_value,
    predict_modules,
    reads_pictures,
    short_names,
)
from skylite.adapters.tensor_file import (
    PICKLE,
    WEIGHTS,
    copy_tensors,
    differing_tensor,
    tensor_shapes_of,
)
from skylite.config.check_regex import check_regex
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.text_model import PARTS, model_shapes, text_shapes
from skylite.notes import Note, warning
from skylite.run.files import atomic_folder
from skylite.run.run_dir import adapter_name
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

N = TypeVar("N", int, float)

CONFIG, MANIFEST = "adapter_config.json", "manifest.json"
PREFIX = "base_model.model."
"""What PEFT puts before the path of a module."""
MATRIX = re.compile(
    r"(?P<path>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?!weight$)[^.]+)?(\.weight)?"
)
"""Name of a LoRA matrix. Some frameworks leave the adapter's name in it, as in lora_A.default.weight."""
SAVED = re.compile(r"(base_model\.model\.)?(?P<path>.+?)(\.base_layer)?\.weight")
"""Name of a weight of the base that PEFT saved beside LoRA."""
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
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    base_model: str
    """Name or folder recorded in the adapter."""
    target_modules: list[str] | None
    """Module names; None when the adapter has a pattern or nothing instead."""
    target_parameters: list[str]
    """Expert weights, as in lora.target_parameters."""
    shapes: dict[str, list[int]]
    """Shape of each matrix, by PEFT's name."""
    odd_name: str | None
    """A name of a tensor that engines do not read; None if they read all."""
    saved: dict[str, str]
    """Other tensors in the file, each with the name of the base's weight that it must equal."""
    manifest: Manifest | None
    """None for an adapter that skylite did not publish."""

    @property
    def max_rank(self) -> int:
        """The highest rank of a module."""
        return max([self.rank, *self.rank_pattern.values()])

    def scale_of(self, path: str) -> float:
        """What multiplies B A x of the module at `path`."""
        rank = pattern_value(self.rank_pattern, path, self.rank)
        alpha = pattern_value(self.alpha_pattern, path, self.alpha)
        return alpha / (math.sqrt(rank) if self.use_rslora else rank)


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
    paths = [path_of(name) for name in found.shapes]
    frozen = {setting: not any(reads_pictures(path, [setting]) for path in paths) for setting in PARTS}
    has: dict[str, Any] = {
        **frozen,
        "rank": found.rank,
        "alpha": found.alpha,
        "use_rslora": found.use_rslora,
        "target_parameters": found.target_parameters,
        "rank_pattern": found.rank_pattern,
        "alpha_pattern": found.alpha_pattern,
    }
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
    planned = lora.model_copy(update={"target_parameters": found.target_parameters, **frozen})
    update: dict[str, Any] = {**has, **_targets(planned, chosen, adapted, found.folder, model_path)}
    try:
        fresh = LoraConfig.model_validate(lora.model_dump() | update)
    except ValidationError as error:
        first = error.errors()[0]
        raise ModelError(
            f"The adapter {found.folder} cannot be used: {'.'.join(map(str, first['loc']))}: {first['msg']}.",
            MERGE,
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


def check_teacher(config: TrainConfig, folder: str, model_path: Path, fingerprint: str) -> list[Note]:
    """Check the adapter that algorithm.teacher names against the base model. Returns notes on it.

    Raises ConfigError or ModelError.
    """
    found = read_warm_start(expand_adapter_path(folder))
    notes = check_base_model(found, config.model.name, model_path, fingerprint)
    lora = lora_of(found.folder, model_path)
    about = f"teacher {found.folder} (rank {lora.rank}, alpha {lora.alpha:g})"
    return [Note(text) for text in (*notes, about)]


def lora_of(folder: Path, model_path: Path) -> LoraConfig:
    """The settings with which a policy would have exactly the matrices of an adapter. Raises ModelError."""
    config = TrainConfig(lora=LoraConfig(from_adapter=str(folder)))
    return adopt_adapter(config, (), model_path)[0].lora


def read_warm_start(folder: Path) -> WarmStart:
    """Read an adapter folder and check that it holds intact, plain LoRA weights.

    With a manifest, also checks their hash. Raises ModelError.
    """
    _require_files(folder)
    peft, tensors = _plain_lora(folder), tensor_shapes_of(folder)
    shapes, saved = _lora_shapes(folder, tensors)
    for name, shape in shapes.items():
        path = path_of(name)
        rank, expected = _rank_of(name, shape), pattern_value(peft["rank_pattern"], path, peft["r"])
        if rank % expected if is_experts(path) else rank != expected:
            raise ModelError(
                f"{folder} has {name} of rank {rank}, but its {CONFIG} says {expected}.",
                "The folder is damaged.",
            )
    return WarmStart(
        folder=folder.resolve(),
        rank=peft["r"],
        alpha=peft["lora_alpha"],
        use_rslora=bool(peft.get("use_rslora")),
        rank_pattern=peft["rank_pattern"],
        alpha_pattern=peft["alpha_pattern"],
        base_model=str(peft.get("base_model_name_or_path")),
        target_modules=peft["target_modules"],
        target_parameters=peft["target_parameters"],
        shapes=shapes,
        odd_name=next((n for n in tensors if n in saved or not usual_name(n).endswith(n)), None),
        saved=saved,
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


def copy_adapter(source: Path, copied: Path) -> None:
    """Copy the adapter as the folder `copied` of a run, atomically.

    Raises ModelError for a damaged copy, WriteFailed.
    """
    with atomic_folder(copied, warm_start_bytes(source)) as folder:
        copy_tensors(source, folder, read_warm_start(source).saved)
        for name in (CONFIG, MANIFEST):
            if (source / name).is_file():
                shutil.copyfile(source / name, folder / name)
        read_warm_start(folder)


def expand_adapter_path(from_adapter: str) -> Path:
    """Expand ~ in lora.from_adapter. Path.expanduser would raise for names that no file can have."""
    return Path(os.path.expanduser(from_adapter))


def warm_start_bytes(source: Path) -> int:
    """Size in bytes of the copy that a run makes."""
    files = [source / name for name in (CONFIG, WEIGHTS, PICKLE, MANIFEST)]
    return sum(file.stat().st_size for file in files if file.is_file())


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
    if not (folder / WEIGHTS).is_file() and not (folder / PICKLE).is_file():
        hint = f"Give a folder saved by skylite or PEFT, e.g. {example}."
        raise ModelError(f"{what}: {WEIGHTS} is missing.", hint)


def _adapted_paths(found: WarmStart, model_path: Path) -> set[str]:
    """The modules that the adapter changes. Raises ModelError unless they are the model's, of its shapes."""
    if (other := differing_tensor(found.folder, found.saved, model_path)) is not None:
        raise ModelError(
            f"The adapter {found.folder} has {other}, a weight that is not LoRA and not the one of "
            f"{model_path.name}: it was trained, or belongs to another model.",
            MERGE,
        )
    adapted, text, every = set(), text_shapes(model_path), model_shapes(model_path)
    shapes = text | {name: shape for name, shape in every.items() if reads_pictures(name, list(PARTS))}
    layers = expert_layers(shapes)
    for name, shape in found.shapes.items():
        path, side = path_of(name), 1 if is_a(name) else 0
        if path.rpartition(".")[2] in LM_HEADS:
            raise ModelError(
                f"The adapter {found.folder} has LoRA on the LM head ({path}), which engines leave out of "
                "prompt log-probabilities, so no adapter could be verified.",
                "Train it without the head (Tinker: train_unembed=False), or merge it into its base with "
                "PEFT's merge_and_unload and start from that model.",
            )
        if is_experts(path):
            adapted.add(_require_experts(found, name, layers))
            continue
        if EXPERTS in path:
            raise ModelError(
                f"The adapter {found.folder} has LoRA on single experts ({path}), as transformers 4 had "
                "them; transformers 5 has one parameter for all of a layer.",
                MERGE,
            )
        weight = shapes.get(f"{path}.weight")
        if weight is None:
            raise ModelError(
                f"The adapter {found.folder} changes {path}, which {model_path.name} does not have.",
                "Set --model to the adapter's own base model.",
            )
        if shape[side] not in weight:
            raise ModelError(
                f"The adapter {found.folder} has {name} {shape}, and that module of {model_path.name} is "
                f"{weight}.",
                "Set --model to the adapter's own base model.",
            )
        adapted.add(path)
    return adapted


def _require_experts(found: WarmStart, name: str, layers: Mapping[str, ExpertSizes]) -> str:
    """The module of experts that a matrix belongs to. Raises ModelError unless it has the model's shape."""
    path = path_of(name)
    rank, experts = pattern_value(found.rank_pattern, path, found.rank), layers.get(module_of(path))
    if experts is not None:
        number, hidden, inner = experts
        sides = (hidden, 2 * inner) if path.endswith(BASE_LAYER) else (inner, hidden)
        expected = [number * rank, sides[0]] if is_a(name) else [sides[1], rank * number]
        if found.shapes[name] == expected:
            return module_of(path)
    raise ModelError(
        f"The adapter {found.folder} has {name} {found.shapes[name]}, which does not fit this model's "
        "experts.",
        "Set --model to the adapter's own base model.",
    )


def _targets(
    lora: LoraConfig, chosen: Collection[str], adapted: set[str], adapter: Path, model_path: Path
) -> dict[str, Any]:
    """lora.target_modules and exclude_modules under which a run trains exactly the adapter's modules.

    `lora` has the adapter's target_parameters and frozen parts.
    """
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
    every = lora.model_copy(update={"target_modules": "all-linear", "exclude_modules": []})
    if predict_modules(model_path, every)[1] == adapted:
        return {"target_modules": every.target_modules, "exclude_modules": []}
    linear = [path for path in adapted if not is_experts(path)]
    return {"target_modules": short_names(modules, linear), "exclude_modules": []}


def _plain_lora(folder: Path) -> dict[str, Any]:
    """Read adapter_config.json of plain LoRA. Raises ModelError for any other kind.

    In the result "r" is an int, "lora_alpha" a float, "target_modules" a list of names or None, and the
    patterns have only what changes something.
    """
    path = folder / CONFIG
    try:
        peft = parse_json(read_text(path))
        kind, reasons = (
            str(peft["peft_type"]),
            [reason for key, reason in UNSUPPORTED_KEYS.items() if peft.get(key)],
        )
        rank, alpha = int(peft["r"]), float(peft["lora_alpha"])
        peft |= {
            "r": rank,
            "lora_alpha": alpha,
            "target_modules": _names(peft.get("target_modules")),
            "target_parameters": _names(peft.get("target_parameters")) or [],
            "rank_pattern": _pattern(peft.get("rank_pattern"), int, rank),
            "alpha_pattern": _pattern(peft.get("alpha_pattern"), float, alpha),
        }
        if not math.isfinite(sum([alpha, *peft["alpha_pattern"].values()])):
            raise ValueError(f"lora_alpha is {alpha} and alpha_pattern {peft['alpha_pattern']}")
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
            f"init_lora_weights={peft['init_lora_weights']} fits a changed base model (PEFT "
            "converts it: save_pretrained, path_initial_model_for_weight_conversion)"
        )
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
        raise TypeError(f"target_modules or target_parameters is {modules!r:.80}")
    return modules


def _pattern(pattern: Any, number: Callable[[Any], N], default: N) -> dict[str, N]:
    """A rank_pattern or alpha_pattern; empty if it changes nothing."""
    values = {key: number(value) for key, value in (pattern or {}).items()}
    for key in values:
        check_regex(key)
    return {} if set(values.values()) <= {default} else values


def _lora_shapes(
    folder: Path, tensors: Mapping[str, list[int]]
) -> tuple[dict[str, list[int]], dict[str, str]]:
    """Shape of each LoRA matrix by PEFT's name, and the other tensors with the names of the base's weights.

    Raises ModelError.
    """
    shapes: dict[str, list[int]] = {}
    saved = {}
    for name, shape in tensors.items():
        if MATRIX.fullmatch(name) is None:
            match = SAVED.fullmatch(name)
            if match is None:
                raise ModelError(f"{folder} contains {name} {shape}, which is not a LoRA matrix.", MERGE)
            saved[name] = f"{match['path']}.weight"
            continue
        if len(shape) != 2:
            raise ModelError(f"{folder} contains {name} {shape}, which is not a LoRA matrix.", MERGE)
        if (usual := usual_name(name)) in shapes:
            raise ModelError(f"{folder} has {usual} twice.", "Save the adapter alone in that folder.")
        shapes[usual] = shape
    if not shapes:
        raise ModelError(f"{folder} contains no LoRA matrix.", "Give a folder saved by skylite or PEFT.")
    return shapes, saved


def path_of(matrix: str) -> str:
    """The path of the module in the base."""
    match = MATRIX.fullmatch(matrix)
    assert match is not None, "the names were read with it"
    return match["path"].removeprefix(PREFIX)


def is_a(matrix: str) -> bool:
    match = MATRIX.fullmatch(matrix)
    return match is not None and match["side"] == "A"


def _rank_of(name: str, shape: Sequence[int]) -> int:
    return shape[0 if is_a(name) else 1]


def _format_value(value: Any) -> str:
    return (
        f"{value:g}" if isinstance(value, int | float) and not isinstance(value, bool) else json.dumps(value)
    )
