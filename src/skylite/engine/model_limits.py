"""Models and lengths that no run can use, from config.json alone, before a process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skylite.config.train import TrainConfig
from skylite.engine.tensor_parallel import text_section
from skylite.errors import ConfigError, ModelError
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names in config.json for the tokens of the longest sequence."""
OTHER_PARTS = ("vision_config", "audio_config", "vision_tower_config", "img_processor")
"""Sections of config.json that describe a part which sees no text."""
WRAPPER = "ForConditionalGeneration"
QUANTISED = ("quantization_config", "compression_config")


def check_trainable(model_path: Path) -> None:
    """Raise ModelError for quantised weights, and for a language model inside a multimodal one."""
    config = _sections(model_path)[0]
    if (method := quantisation(config)) is not None:
        raise ModelError(
            f"The base {model_path.name} is quantised ({method}), and skylite has no QLoRA: trainer and "
            "engine need the same unquantised weights.",
            "Use the 16-bit model that it was made from, and a smaller one if that does not fit.",
        )
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith(WRAPPER) or any(config.get(part) for part in OTHER_PARTS):
        raise ModelError(
            f"{model_path.name} is a {architecture}: a language model inside a multimodal one. skylite "
            "cannot train those yet: trainer and engine name the layers differently, and the engine would "
            "leave out their LoRA.",
            "Choose a text-only model, whose config.json names a ...ForCausalLM.",
        )


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The method that config.json names, such as fp8; None for plain weights."""
    for section in (config, text_section(config)):
        for name in QUANTISED:
            if isinstance(method := section.get(name), dict) and method:
                return str(method.get("quant_method") or name)[:40]
    return None


def context_length(model_path: Path) -> int | None:
    """Tokens, before a factor that scales positions; None where config.json does not say."""
    return _length(_sections(model_path))


def check_context(config: TrainConfig, model_path: Path) -> None:
    """Raise ConfigError if a prompt and its completion may be longer than the model's context.

    Where a factor scales positions (RoPE scaling), the engine decides.
    """
    sections, needed = _sections(model_path), config.max_sequence_tokens
    longest = _length(sections)
    if longest is None or needed <= longest:
        return
    if any(factor for section in sections for factor in _factors(section)):
        return
    raise ConfigError(
        f"{config.source.limits} {needed:,} tokens, and {model_path.name} was made for {longest:,}.",
        "Lower the limit.",
    )


def _sections(model_path: Path) -> tuple[Mapping[str, Any], ...]:
    config = parse_json(read_text(model_path / "config.json"))
    return config, text_section(config)


def _length(sections: Iterable[Mapping[str, Any]]) -> int | None:
    lengths = [section[name] for section in sections for name in LENGTHS if name in section]
    return min((length for length in lengths if type(length) is int and length > 0), default=None)


def _factors(section: Mapping[str, Any]) -> Iterator[Any]:
    """The factors of RoPE scaling, one for each kind of layer."""
    for name in ("rope_scaling", "rope_parameters"):
        scaling = section.get(name)
        if isinstance(scaling, dict):
            yield scaling.get("factor")
            yield from (inner.get("factor") for inner in scaling.values() if isinstance(inner, dict))
