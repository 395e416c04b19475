"""Models and lengths that no run can use, from config.json alone, before a process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skylite.config.train import TrainConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.text_model import is_wrapper, other_parts, read_config, text_section

LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names in config.json for the tokens of the longest sequence."""
QUANTISED = ("quantization_config", "compression_config")


def check_trainable(model_path: Path) -> None:
    """Raise ModelError for quantised weights."""
    config = _sections(model_path)[0]
    if (method := quantisation(config)) is not None:
        raise ModelError(
            f"The base {model_path.name} is quantised ({method}), and skylite has no QLoRA: trainer and "
            "engine need the same unquantised weights.",
            "Use the 16-bit model that it was made from, and a smaller one if that does not fit.",
        )


def text_only_note(model_path: Path) -> str:
    """What a run does with a model that also reads pictures or sound; "" for a model of text alone."""
    if not is_wrapper(read_config(model_path)):
        return ""
    return (
        f"{model_path.name} is a text model with other parts ({', '.join(other_parts(model_path))}): prompts "
        "are text, the adapter is on the text model alone, and the other parts stay as they are"
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
    config = read_config(model_path)
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
