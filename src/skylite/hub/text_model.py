"""Where a model's text model is: in config.json, in the names of its tensors, and in transformers.

Many models are published as `...ForConditionalGeneration`: a text model beside towers that read pictures or
sound. skylite trains and serves their text model. The towers stay as they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from skylite.hub.quantised import Format, read_format, widened_shapes
from skylite.hub.resolve import tensor_shapes
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

Shapes = Mapping[str, Sequence[int]]
"""Shape of each tensor, by name."""
TEXT_SECTIONS = ("thinker_config", "text_config", "llm_config", "language_config")
"""Sections of config.json that describe the language model of a model with several parts."""
OTHER_PARTS = ("vision_config", "audio_config", "vision_tower_config", "img_processor")
"""Sections of config.json that describe a part which sees no text."""

QUANTISED = ("quantization_config", "compression_config")
"""Sections of config.json that describe quantised weights."""
IMAGE_MODELS = {"qwen2_5_vl": "Qwen2.5-VL", "qwen3_vl": "Qwen3-VL"}
"""`model_type` of the models that skylite trains on prompts with images -> their names."""

TOWER = "model.visual."
"""Begins the paths of the modules that read images in transformers' classes of them."""
PARTS = {
    "freeze_vision": (f"{TOWER}blocks.",),
    "freeze_projection": (f"{TOWER}merger.", f"{TOWER}deepstack_merger_list."),
}
"""Setting of LoRA -> what begins the paths of the modules that it freezes: the tower's layers, and those
between the tower and the text model."""

TEXT_PATH, HEAD = "model.language_model", "lm_head.weight"
"""Where transformers' classes have the text model of a model with several parts, and its head.
engine/vllm/vllm_models.json has no others: tests/integration/vllm_models.py leaves them out."""


def text_section(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The part of config.json that describes the language model."""
    for name in TEXT_SECTIONS:
        if isinstance(section := config.get(name), dict):
            return text_section(section)
    return config


def is_wrapper(config: Mapping[str, Any]) -> bool:
    """Whether config.json describes a text model inside a model with several parts."""
    return text_section(config) is not config or any(config.get(part) for part in OTHER_PARTS)


def reads_images(config: Mapping[str, Any]) -> bool:
    """Whether skylite trains the model of this config.json on prompts with images."""
    return config.get("model_type") in list(IMAGE_MODELS)  # a list: in a damaged file it has any type


def text_layers(shapes: Shapes, config: Mapping[str, Any]) -> dict[str, dict[str, Sequence[int]]]:
    """The text model's layers by prefix (`model.layers.3.`): their tensors, named below it.

    Of all stacks of numbered layers, the one with as many layers as config.json says, of its hidden size; of
    several, the largest.
    """
    section = text_section(config)
    stacks: dict[str, dict[str, dict[str, Sequence[int]]]] = {}
    for name, shape in shapes.items():
        parts = name.split(".")
        number = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        if number is not None:
            prefix, rest = ".".join(parts[: number + 1]) + ".", ".".join(parts[number + 1 :])
            stacks.setdefault(".".join(parts[:number]), {}).setdefault(prefix, {})[rest] = shape

    def fitness(layers: Mapping[str, Shapes]) -> tuple[bool, bool, int]:
        every = [shape for layer in layers.values() for shape in layer.values()]
        return (
            len(layers) == section.get("num_hidden_layers"),
            any(section.get("hidden_size") in shape for shape in every),
            sum(map(_elements, every)),
        )

    return max(stacks.values(), key=fitness, default={})


def text_tensors(shapes: Shapes, config: Mapping[str, Any]) -> dict[str, str]:
    """The tensors of the text model in a model with several parts: name in a file -> in transformers.

    They are beside its layers, and a head of the vocabulary's size.
    """
    layers, section = text_layers(shapes, config), text_section(config)
    if not layers:
        return {}
    stack = next(iter(layers)).rstrip(".").rpartition(".")[0]
    parent = stack[: stack.rfind(".") + 1]
    head = [section.get("vocab_size"), section.get("hidden_size")]
    named = {n: f"{TEXT_PATH}.{n.removeprefix(parent)}" for n in shapes if n.startswith(parent)}
    return named | {n: HEAD for n, shape in shapes.items() if n not in named and list(shape) == head}


def model_shapes(model_path: Path) -> dict[str, list[int]]:
    """Shape of each tensor in a model folder, by the name that transformers' model gives it.

    Files of one model differ: `language_model.model.layers` or `model.language_model.layers`. Raises
    ModelError for a damaged file. Quantised matrices count as the matrices that they stand for.
    """
    config, form = read_config(model_path), quantised_format(model_path)
    shapes: Shapes = tensor_shapes(model_path) if form is None else widened_shapes(form, model_path)
    if not is_wrapper(config):
        return {name: list(shape) for name, shape in shapes.items()}
    names = text_tensors(shapes, config)
    in_tower = TOWER.removeprefix("model.")
    names |= {name: f"model.{name}" for name in shapes.keys() - names if name.startswith(in_tower)}
    return {names.get(name, name): list(shape) for name, shape in shapes.items()}


def text_shapes(model_path: Path) -> dict[str, list[int]]:
    """The same of the text model alone."""
    shapes = model_shapes(model_path)
    if not is_wrapper(read_config(model_path)):
        return shapes
    return {n: shape for n, shape in shapes.items() if n == HEAD or n.startswith(f"{TEXT_PATH}.")}


def read_config(model_path: Path) -> Mapping[str, Any]:
    """config.json."""
    config: Mapping[str, Any] = parse_json(read_text(model_path / "config.json"))
    return config


def quantised_format(model_path: Path) -> Format | None:
    """How the model's matrices are quantised; None: they are not. Raises ModelError for other formats."""
    config = read_config(model_path)
    for name in QUANTISED:
        if isinstance(settings := config.get(name), dict) and settings:
            return read_format(settings, model_path.name)
    return None


def other_parts(model_path: Path) -> list[str]:
    """The parts beside the text model, such as `model.visual`. Raises ModelError for a damaged file."""
    text, parts = text_shapes(model_path), set()
    for name in model_shapes(model_path).keys() - text.keys():
        path = name.split(".")
        prefixes = [".".join(path[:end]) for end in range(1, len(path))]
        parts.add(next((p for p in prefixes if not any(n.startswith(f"{p}.") for n in text)), name))
    return sorted(parts)


def auto_class(config: Any) -> Any:
    """transformers' class for loading a model with this configuration: the one that published it."""
    from transformers import AutoModelForCausalLM, AutoModelForImageTextToText
    from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING

    is_known = type(config) in MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return AutoModelForImageTextToText if is_known else AutoModelForCausalLM


def _elements(shape: Sequence[int]) -> int:
    found = 1
    for size in shape:
        found *= size
    return found
