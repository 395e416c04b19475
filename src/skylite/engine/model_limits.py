"""Models and lengths that no run can use, from config.json alone, before a process starts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from skylite.adapters.target_modules import EXPERTS
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig, TrainerConfig
from skylite.errors import ConfigError, ModelError
from skylite.hub.families import family_of
from skylite.hub.quantised import quantised_modules
from skylite.hub.resolve import tensor_shapes
from skylite.hub.text_model import (
    IMAGE_MODELS,
    is_wrapper,
    other_parts,
    quantised_format,
    read_config,
    reads_images,
    text_layers,
    text_section,
    text_tensors,
)
from skylite.types import Prompt

REMEDY = "Use the 16-bit model that it was made from, and a smaller one if that does not fit."
UNUSED = "mtp."
"""Begins the names of layers that guess further tokens (Qwen3.5): neither trainer nor engine reads them."""
LENGTHS = ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
"""Names in config.json for the tokens of the longest sequence."""


def check_trainable(model_path: Path, trainer: TrainerConfig | None = None) -> str:
    """Raise ModelError for a family or quantised weights that the trainer does not compute.

    Returns a note on quantised weights, or "".
    """
    family_of(read_config(model_path), model_path.name)
    form = quantised_format(model_path)
    if form is None:
        return ""
    names, config = tensor_shapes(model_path), read_config(model_path)
    modules = quantised_modules(form, names)
    in_layers = tuple(text_layers(names, config))
    outside = sorted(m for m in modules if not m.startswith((*in_layers, UNUSED)))
    reason = (
        "its tensors have other names than in transformers"
        if is_wrapper(config) and any(a != b for a, b in text_tensors(names, config).items())
        else "experts are quantised, which skylite does not train beside"
        if any(EXPERTS in f".{module}." for module in modules)
        else f"{outside[0]} is quantised, which is not a layer of the text model"
        if outside
        else "trainer.offload=true moves 16-bit weights alone"
        if trainer is not None and trainer.offload
        else "trainer.replicate_base=false divides 16-bit weights alone among ranks"
        if trainer is not None and _divides(trainer)
        else "config.json says so, and its files hold no quantised matrix"
        if not modules
        else ""
    )
    if reason:
        raise ModelError(f"The base {model_path.name} is quantised ({form.name}): {reason}.", REMEDY)
    return (
        f"{model_path.name} is quantised ({form.name}): it stays so in the trainer, in full on each "
        "rank, which widens a matrix where it is used; the adapter is not quantised"
    )


def _divides(trainer: TrainerConfig) -> bool:
    """Whether someone asked for the base in parts."""
    return (
        trainer.num_ranks > 1 and "replicate_base" in trainer.model_fields_set and not trainer.replicate_base
    )


def other_parts_note(model_path: Path, lora: LoraConfig, max_images: int = 0) -> str:
    """What a run does with a model that also reads pictures or sound; "" for a model of text alone."""
    if not is_wrapper(read_config(model_path)):
        return ""
    prompts = f"have up to {max_images} image(s)" if max_images else "are text"
    adapter = (
        f"the adapter is on the text model and, by {' and '.join(f'lora.{n}=false' for n in lora.unfrozen)}, "
        "on what reads images"
        if lora.unfrozen
        else "the adapter is on the text model alone, and the other parts stay as they are"
    )
    return (
        f"{model_path.name} is a text model with other parts ({', '.join(other_parts(model_path))}): prompts "
        f"{prompts}, and {adapter}"
    )


def check_unfrozen(model_path: Path, lora: LoraConfig, max_images: int) -> None:
    """Raise ModelError for LoRA on modules that read images, without images or in another model."""
    if not lora.unfrozen:
        return
    config, setting = read_config(model_path), lora.unfrozen[0]
    if not reads_images(config):
        raise ModelError(
            f"lora.{setting}=false, and skylite trains {' and '.join(IMAGE_MODELS.values())} on images, not "
            f"{model_path.name} ({config.get('model_type')}).",
            "Leave that setting out, or choose such a model.",
        )
    if not max_images:
        raise ModelError(
            f"lora.{setting}=false, and no prompt has an image: what reads images would learn nothing.",
            "Leave that setting out, or prepare data with images.",
        )


def check_images(model_path: Path, prompts: Iterable[Prompt]) -> None:
    """Raise ModelError for prompts with images and a model that skylite trains on text alone."""
    config = read_config(model_path)
    seen = next((prompt for prompt in prompts if prompt.images), None)
    if seen is not None and not reads_images(config):
        raise ModelError(
            f"The prompt {seen.id} has images, and skylite trains {' and '.join(IMAGE_MODELS.values())} on "
            f"images, not {model_path.name} ({config.get('model_type')}).",
            "Choose such a model, or prepare the data without images.",
        )


def context_length(model_path: Path) -> int | None:
    """Tokens, before a factor that scales positions; None where config.json does not say."""
    return _length(_sections(model_path))


def check_context(config: TrainConfig, model_path: Path) -> None:
    """Raise ConfigError if a prompt and its completion may be longer than the model's context.

    Where a factor scales positions (RoPE scaling), the engine decides.
    """
    sections, needed = _sections(model_path), config.engine_sequence_tokens
    longest = _length(sections)
    if longest is None or needed <= longest:
        return
    if any(factor for section in sections for factor in _factors(section)):
        return
    asked = "A question to the judge (reward.judge) counts; " if needed > config.max_sequence_tokens else ""
    raise ConfigError(
        f"{config.source.limits} {needed:,} tokens, and {model_path.name} was made for {longest:,}.",
        f"{asked}lower the limit." if asked else "Lower the limit.",
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
