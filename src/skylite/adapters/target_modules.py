"""Names of modules that get LoRA: match patterns, and their short names."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TypeVar

import regex

from skylite.adapters.experts import chosen_experts, expert_layers, is_experts, peft_names
from skylite.config.lora import WILDCARD, LoraConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.text_model import PARTS, TOWER, model_shapes, read_config, text_shapes
from skylite.notes import Note, warning

T = TypeVar("T")

EXPERTS = ".experts."
"""In the names of weights of experts. transformers joins those of a layer in parameters of one module."""
ROUTERS = (
    *("mlp.gate", "block_sparse_moe.gate", "mlp.router", "router.layer", "router.gate"),
    *("feed_forward.router", "feed_forward.gate", "block_sparse_moe.router", "mixer.gate", "moe.gate"),
    "router.proj",
    "shared_expert_gate",
)
"""Ends of paths of gates and routers of experts, which get no LoRA. vLLM ignores that of shared_expert_gate:
its shared expert holds the gate under another name."""

LATENT = "kv_b_proj"
"""Of latent attention, as in DeepSeek's models: engines fold it into the products beside it, without LoRA."""
UNFOLDED = ("minicpm3",)
"""Model types whose latent attention vLLM computes as transformers does."""
MAMBA_TYPES = ("falcon_h1", "mamba", "mamba2", "falcon_mamba", "nemotron_h")
"""Model types whose `out_proj` PEFT refuses: Mamba's fused kernels read its weight without LoRA."""

LM_HEADS = ("lm_head", "embed_out", "output_layer")
"""The last part of the LM head's path in transformers' models. A head that shares the embedding's weight is
in no file."""


MEGATRON = {
    "linear_qkv": ("q_proj", "k_proj", "v_proj", "qkv_proj", "query_key_value"),
    "linear_q": ("q_proj",),
    "linear_k": ("k_proj",),
    "linear_v": ("v_proj",),
    "linear_proj": ("o_proj", "attention.dense"),
    "linear_fc1": ("gate_proj", "up_proj", "gate_up_proj", "dense_h_to_4h"),
    "linear_fc1_gate": ("gate_proj",),
    "linear_fc1_up": ("up_proj",),
    "linear_fc2": ("down_proj", "dense_4h_to_h"),
    "linear_q_proj": ("q_proj",),
    "linear_q_down_proj": ("q_a_proj",),
    "linear_q_up_proj": ("q_b_proj",),
    "linear_kv_down_proj": ("kv_a_proj_with_mqa",),
    "linear_kv_up_proj": (LATENT,),
}
"""Megatron's name of a module -> its names in transformers' models."""

MATCH_TIMEOUT_S = 1.0
"""Limit for one pattern on one name. Some patterns take exponential time."""


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Whether a module path matches a pattern: the end of the path, or a regex for the full path.

    A pattern that begins with `*` has wildcards and no regex. Its last part may be Megatron's name.
    Raises ConfigError for a regex that takes longer than MATCH_TIMEOUT_S.
    """
    return any(
        name == p or name.endswith(f".{p}") or _fully_matches(name, p)
        for pattern in patterns
        for p in _in_transformers(pattern)
    )


def pattern_value(pattern: Mapping[str, T], path: str, default: T) -> T:
    """The module's value in a rank_pattern or alpha_pattern, by the rule of PEFT and vLLM: the first key that
    is a regex for the path or for its end after a dot. Raises ConfigError as `matches` does."""
    return next((v for key, v in pattern.items() if _fully_matches(path, rf"(.*\.)?({key})")), default)


def _in_transformers(pattern: str) -> list[str]:
    """The pattern with transformers' names in the place of Megatron's."""
    path, dot, last = pattern.rpartition(".")
    return [f"{path}{dot}{name}" for name in MEGATRON.get(last, (last,))]


def _fully_matches(name: str, pattern: str) -> bool:
    if pattern.startswith(WILDCARD):
        return fnmatchcase(name, pattern)
    try:
        return regex.fullmatch(pattern, name, timeout=MATCH_TIMEOUT_S) is not None
    except TimeoutError:
        raise ConfigError(
            f"The regex {pattern!r} of the settings of LoRA takes longer than {MATCH_TIMEOUT_S:g} s for the "
            f"module {name}.",
            "Write it without a repeat inside a repeat, such as (a+)+.",
        ) from None


def without_lora(model_type: object) -> tuple[str, ...]:
    """Ends of paths of linear modules that get no LoRA in models of this type."""
    mamba = ["out_proj"] if model_type in MAMBA_TYPES else []
    return (*ROUTERS, *mamba, *([] if model_type in UNFOLDED else [LATENT]))


def in_layers(name: str) -> bool:
    """Whether `all-linear` adapts a linear module: in a numbered layer, or between a tower and the text
    model."""
    return any(part.isdigit() for part in name.split(".")) or name.startswith(PARTS["freeze_projection"])


def reads_pictures(name: str, settings: Sequence[str]) -> bool:
    """Whether a module is in the parts that these settings of LoRA freeze or unfreeze."""
    return any(name.startswith(PARTS[setting]) for setting in settings)


def short_names(modules: Iterable[str], chosen: Iterable[str]) -> list[str]:
    """Shorten the full paths `chosen` to their last component where it is unambiguous; sorted.

    A component that also occurs in `modules` outside of `chosen` is ambiguous; those paths stay full.
    """
    chosen = set(chosen)
    ambiguous = {name.rpartition(".")[2] for name in modules if name not in chosen}
    return sorted(
        {suffix if (suffix := name.rpartition(".")[2]) not in ambiguous else name for name in chosen}
    )


def last_names(modules: Iterable[str]) -> list[str]:
    """The last parts of paths, sorted: what engines compare with the names of their own modules.

    Of what reads images, `proj` and numbers keep their paths: other modules, without LoRA, end so, too.
    """
    return sorted({name if _ends_as_others(name) else name.rpartition(".")[2] for name in modules})


def _ends_as_others(name: str) -> bool:
    last = name.rpartition(".")[2]
    return name.startswith(TOWER) and (last == "proj" or last.isdigit())


def predict_target_modules(model_path: Path, config: LoraConfig) -> list[str]:
    """The target_modules that the trainer's manifest will most likely contain, so that engines start first.

    Callers must compare the result with the manifest. Raises ModelError for a damaged file.
    """
    return short_names(*predict_modules(model_path, config))


def predict_modules(model_path: Path, config: LoraConfig) -> tuple[set[str], set[str]]:
    """Paths of all modules with weights, and of those that most likely get LoRA, read from the weight files.

    Weight files do not record module types. This assumes that a matrix in a numbered layer belongs to a
    linear module, and any other matrix to the embedding or LM head. Experts get LoRA by
    lora.target_parameters alone; their routers get none. In a model that also reads pictures or sound, only
    the text model gets LoRA, and what lora.freeze_vision and freeze_projection leave to it. Raises ModelError
    for a damaged file, and for other target_parameters than experts.
    """
    every = _adaptable(model_path, config)
    shapes, experts = _outside_experts(every), expert_layers(every)
    paths = [name.split(".") for name in shapes]
    modules = {".".join(path[:end]) for path in paths for end in range(1, len(path))}
    matrices = _matrices(shapes, model_path)
    if config.target_modules == "all-linear":
        chosen = {name for name in matrices if in_layers(name)}
    else:
        chosen = {name for name in matrices if matches(name, config.target_modules)}
    chosen = {name for name in chosen if not matches(name, config.exclude_modules)}
    return modules | experts.keys(), chosen | set(chosen_experts(experts, config))


def check_target_names(model_path: Path, config: LoraConfig, section: str = "lora") -> list[Note]:
    """Raise ModelError for a name in target_modules of that section of settings that matches nothing: PEFT
    would ignore it.

    Returns a warning for each such name in lora.exclude_modules.
    """
    shapes = _outside_experts(_adaptable(model_path, config))
    matrices = _matrices(shapes, model_path)
    names = sorted({name.rpartition(".")[2] for name in matrices})
    targets = [] if config.target_modules == "all-linear" else config.target_modules
    for target in targets:
        if not any(matches(name, [target]) for name in (*matrices, *LM_HEADS)):
            close = difflib.get_close_matches(target, names, n=1)
            raise ModelError(
                f"{section}.target_modules names {target!r}, which matches no module of {model_path.name} "
                "that can have LoRA.",
                f"{f'Did you mean {close[0]!r}? ' if close else ''}Its modules are {', '.join(names)}.",
            )
    modules, chosen = predict_modules(model_path, config)
    if not chosen:
        raise ModelError(
            f"{section}.target_modules={config.target_modules!r} without "
            f"lora.exclude_modules={config.exclude_modules!r} leaves no module of {model_path.name}.",
            f"Use names of its modules: {', '.join(names)}.",
        )
    for setting in config.unfrozen:
        if not any(reads_pictures(name, [setting]) for name in chosen):
            raise ModelError(
                f"lora.{setting}=false, and lora.target_modules={config.target_modules!r} without "
                f"lora.exclude_modules={config.exclude_modules!r} names no module there.",
                f"Leave that setting out, or add some of {_names_in(shapes, setting)}.",
            )
    if section == "critic" and (heads := [name for name in LM_HEADS if targets and matches(name, targets)]):
        raise ModelError(
            f"critic.target_modules={targets!r} includes the LM head ({heads[0]}), which the critic does not "
            "compute: it has a head of its own.",
            "Name other modules.",
        )
    for setting in ("rank_pattern", "alpha_pattern"):
        for key in getattr(config, setting):
            if not any(pattern_value({key: True}, name, False) for name in chosen):
                close = difflib.get_close_matches(key, names, n=1)
                raise ModelError(
                    f"lora.{setting} names {key!r}, which matches no module that gets LoRA.",
                    f"{f'Did you mean {close[0]!r}? ' if close else ''}"
                    f"These do: {', '.join(short_names(modules, chosen))}.",
                )
    _check_expert_patterns(chosen, config)
    unused = [n for n in config.exclude_modules if not any(matches(m, [n]) for m in (*modules, *LM_HEADS))]
    return [
        warning(f"lora.exclude_modules names {name!r}, which matches no module of {model_path.name}")
        for name in unused
    ]


def _check_expert_patterns(chosen: Iterable[str], config: LoraConfig) -> None:
    """Raise ModelError for a rank or alpha of experts that PEFT and vLLM would not both read."""
    for setting in ("rank_pattern", "alpha_pattern"):
        pattern = getattr(config, setting)
        for path in filter(is_experts, chosen):
            values = {pattern_value(pattern, name, None) for name in peft_names(path)}
            if len(values) > 1:
                raise ModelError(
                    f"lora.{setting} matches only some of the names that PEFT and vLLM have for {path}.",
                    "Name experts in it as 'experts.*'.",
                )


def _adaptable(model_path: Path, config: LoraConfig) -> dict[str, list[int]]:
    """The tensors of the text model, and of the other parts that the settings do not freeze."""
    if not config.unfrozen:
        return text_shapes(model_path)
    other = {n: s for n, s in model_shapes(model_path).items() if reads_pictures(n, config.unfrozen)}
    return text_shapes(model_path) | other


def _names_in(shapes: Mapping[str, Sequence[int]], setting: str) -> str:
    weights = [n.removesuffix(".weight") for n, s in shapes.items() if len(s) == 2 and n.endswith(".weight")]
    return ", ".join(sorted({n.rpartition(".")[2] for n in weights if reads_pictures(n, [setting])}))


def _outside_experts(shapes: Mapping[str, list[int]]) -> dict[str, list[int]]:
    return {name: shape for name, shape in shapes.items() if EXPERTS not in name}


def _matrices(shapes: Mapping[str, Sequence[int]], model_path: Path) -> set[str]:
    """Paths of modules with a matrix that may have LoRA."""
    excluded = without_lora(read_config(model_path).get("model_type"))
    matrices = {n.removesuffix(".weight") for n, s in shapes.items() if n.endswith(".weight") and len(s) == 2}
    # Norms of single heads, such as Cohere's q_norm, have a matrix of gains.
    return {name for name in matrices if not name.endswith("norm") and not matches(name, excluded)}
