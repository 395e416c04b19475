"""What a model says about itself before anything starts: for a dry run, and for `skylite models`.

Both call `check_model`, so they cannot disagree.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from skylite.adapters.experts import BOTH
from skylite.adapters.import_adapter import adopt_adapter, check_teacher, check_warm_start
from skylite.adapters.target_modules import EXPERTS, check_target_names, last_names, predict_modules
from skylite.config.lora import LoraConfig
from skylite.config.train import TrainConfig
from skylite.data.chat_tokenizer import NO_TEMPLATE, load_tokenizer, read_template
from skylite.engine.interface import Launcher
from skylite.engine.model_limits import (
    check_context,
    check_trainable,
    check_unfrozen,
    context_length,
    other_parts_note,
)
from skylite.errors import SkyliteError
from skylite.hub.families import Family, family_of
from skylite.hub.resolve import ResolvedModel, tensor_shapes
from skylite.hub.text_model import (
    PARTS,
    is_wrapper,
    other_parts,
    quantised_format,
    read_config,
    reads_images,
)
from skylite.notes import Note, notes_of
from skylite.processes.hardware import Device, choose_device

DEVICES: tuple[Device, ...] = ("cuda", "cpu")


def check_model(
    config: TrainConfig, model: ResolvedModel, launcher: Launcher, device: Device, max_images: int = 0
) -> list[Note]:
    """Check that a model trains with these settings on a device, from its files alone.

    Returns notes. Raises SkyliteError for a family or quantised weights that the trainer does not compute,
    targets that it lacks, an adapter that does not fit, a context that is too short, and what the engine does
    not serve.
    """
    path = model.path
    check_unfrozen(path, config.lora, max_images)
    notes = check_target_names(path, config.lora)
    if config.critic_lora is not None:
        check_target_names(path, config.critic_lora, "critic")
    check_context(config, path)
    if config.engine.num_engines:
        notes += notes_of(launcher.check_model(path, device, config.lora.max_rank, config.lora, max_images))
    if config.lora.from_adapter is not None:
        notes += check_warm_start(config, path, model.fingerprint)
    if (teacher := config.algorithm.teacher_folder) is not None:
        notes += check_teacher(config, teacher, path, model.fingerprint)
    return notes_of(
        other_parts_note(path, config.lora, max_images),
        check_trainable(path, config.trainer),
        *notes,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """What a person wants to know of a model that trains. Texts are answers to read."""

    name: str
    architecture: str
    trains: str
    """How the trainer computes it."""
    tested: str
    """What the sweep of families measured."""
    lora: list[str]
    """Names of the modules that get LoRA with these settings."""
    experts: str
    images: str
    quantised: str
    served: Mapping[str, str]
    """Device -> whether the engine serves it with LoRA: "yes", or the sentence that refuses it."""
    context: int | None
    """Tokens of the longest sequence; None: config.json does not say."""
    chat_template: str
    torchvision: str
    notes: list[str]


def describe_model(config: TrainConfig, model: ResolvedModel, launcher: Launcher) -> ModelFacts:
    """The facts of a model, as a run with these settings would find them. Starts nothing.

    Raises SkyliteError, as a dry run on this machine would, if it trains on no device.
    """
    check_trainable(model.path, config.trainer)
    chosen = {f"lora.{name}" for name in config.lora.model_fields_set}
    config, adapter_notes = adopt_adapter(config, chosen, model.path)
    template = _template_text(config, model.path)
    served, notes, refusals = dict[str, str](), dict[str, None](), dict[str, SkyliteError]()
    for device in DEVICES:
        try:
            images = len(config.lora.unfrozen)  # as if the prompts had them
            notes |= dict.fromkeys(map(str, check_model(config, model, launcher, device, images)))
            served[device] = "yes"
        except SkyliteError as error:
            served[device] = str(error)
            refusals[device] = error
    if len(refusals) == len(DEVICES):
        raise refusals[choose_device()]
    if not config.engine.num_engines:
        served = dict.fromkeys(DEVICES, f"not asked: algorithm.name={config.algorithm.name} samples nothing")
    raw = read_config(model.path)
    family = family_of(raw, model.path.name)
    return ModelFacts(
        name=model.path.name,
        architecture=str(raw["architectures"][0]),
        trains=trains_text(family),
        tested=tested_text(family),
        lora=last_names(predict_modules(model.path, config.lora)[1]),
        experts=_experts_text(model.path, launcher, config.lora),
        images=_images_text(model.path, config.lora),
        quantised=form.name if (form := quantised_format(model.path)) is not None else "no",
        served=served,
        context=context_length(model.path),
        chat_template=template,
        torchvision="not needed",
        notes=[*adapter_notes, *notes],
    )


def takes_expert_lora(model_path: Path, launcher: Launcher, lora: LoraConfig) -> bool:
    """Whether the engine serves LoRA on this model's experts, on a GPU."""
    try:
        lora = lora.model_copy(update={"target_parameters": BOTH})
        predict_modules(model_path, lora)
        launcher.check_model(model_path, "cuda", lora.max_rank, lora)
    except SkyliteError:
        return False
    return True


def _experts_text(model_path: Path, launcher: Launcher, lora: LoraConfig) -> str:
    if not any(EXPERTS in name for name in tensor_shapes(model_path)):
        return "none"
    if lora.target_parameters:
        return "yes, with LoRA"
    if takes_expert_lora(model_path, launcher, lora):
        return f"yes; they get LoRA with lora.target_parameters={json.dumps(BOTH)}"
    return "yes, without LoRA"


def _images_text(model_path: Path, lora: LoraConfig) -> str:
    config = read_config(model_path)
    if not is_wrapper(config):
        return "no"
    parts = ", ".join(other_parts(model_path))
    if not reads_images(config):
        return f"no; {parts} stay as they are"
    if lora.unfrozen:
        return f"yes; {parts} with LoRA, by {' and '.join(f'lora.{name}=false' for name in lora.unfrozen)}"
    settings = " and ".join(f"lora.{name}=false" for name in PARTS)
    return f"yes; {parts} without LoRA, unless {settings} say so"


def trains_text(family: Family | None) -> str:
    """How the trainer computes a family."""
    if family is None or family.packing is None:
        return "unknown: the sweep of this release did not try it"
    if family.packing == "tree":
        return "yes; a shared prompt is computed once (prefix tree)"
    return f"yes; a row for each completion ({family.packing_reason})"


def tested_text(family: Family | None) -> str:
    """What the sweep measured."""
    if family is None or family.packing is None:
        return "not in the sweep"
    return (
        f"tiny random {family.architecture}: log-probabilities within {family.logprobs:.0e} nats of "
        f"transformers and PEFT, gradient within {family.gradient:.0e}"
    )


def _template_text(config: TrainConfig, model_path: Path) -> str:
    """What renders prompts. Raises SkyliteError, as a run does, if it does not render a question."""
    with contextlib.closing(load_tokenizer(model_path, read_template(config.data))) as tokenizer:
        tokenizer.prompt_end([{"role": "user", "content": "1 + 1?"}])
        if tokenizer.note:
            return f"none: {NO_TEMPLATE}"
        return f"{config.data.chat_template}" if config.data.chat_template else "the model's own"
