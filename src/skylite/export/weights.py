"""Writes the exported weights, and loads each kind again to check it with the run's canary."""

from __future__ import annotations

import gc
import json
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skylite.adapters.import_adapter import CONFIG, WarmStart, is_a, path_of, read_warm_start
from skylite.adapters.manifest import Canary
from skylite.adapters.peft_targets import exactly_these_modules
from skylite.adapters.target_modules import pattern_value
from skylite.adapters.tensor_file import WEIGHTS
from skylite.data.chat_tokenizer import (
    TEMPLATE,
    TOKENIZER,
    ChatTemplate,
    own_template,
    run_template,
    text_for_others,
)
from skylite.errors import ModelError
from skylite.export.canary_check import (
    Check,
    check_base,
    check_export,
    compare_bases,
    load_float32,
    model_logprobs,
    versions,
)
from skylite.export.gguf import check_gguf, convert_to_gguf
from skylite.export.original import check_weights
from skylite.export.plan import ExportPlan, adapter_weights, prompt_files
from skylite.hub.resolve import check_folder as check_model_folder
from skylite.hub.resolve import model_files
from skylite.processes.file_tree import remove_tree
from skylite.progress_reporting import long_work
from skylite.run.files import sha256_file, write_json
from skylite.untrusted_files import read_text
from skylite.untrusted_text import parse_json

PROCESSOR_FILES = ("*processor_config.json",)
OLD_TEMPLATE = "chat_template.json"


def export_weights(plan: ExportPlan, folder: Path) -> tuple[list[Check], Canary]:
    """Write what the plan asks for into `folder` and check it. Raises SkyliteError subclasses.

    Returns the checks, and the canary that the export has: the run's, or that of the original weights.
    """
    if not plan.has_merged_weights:
        write_adapter(plan, folder, plan.base_name)
        with long_work("loading the base model and the adapter in float32"):
            return [load_adapted(plan, folder).check], plan.manifest.canary
    merged = folder if plan.merge else folder / "merged"
    checks, canary, merged_logprobs = write_merged(plan, merged)
    if plan.gguf:
        file = folder / f"{plan.name}-{plan.dtype}.gguf"
        with long_work("converting to GGUF"):
            convert_to_gguf(merged, file, plan.dtype)
        with long_work("loading the GGUF file"):
            checks += check_gguf(file, canary, merged_logprobs)
        if not plan.merge:
            remove_tree(merged)
    return checks, canary


def write_adapter(plan: ExportPlan, folder: Path, base_name: str) -> None:
    """Write a PEFT folder with the tokenizer: a copy of the weights, and a configuration of plain LoRA.

    Of an adapter with patterns, matrices of one rank.
    """
    folder.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(adapter_weights(plan), folder / WEIGHTS)
    if (found := sha256_file(folder / WEIGHTS)) != plan.manifest.weights_sha256:
        raise ModelError(
            f"The copy of {adapter_weights(plan)} has sha256 {found}, but the manifest says "
            f"{plan.manifest.weights_sha256}.",
            "The adapter changed during the export, or the disk failed; export again.",
        )
    lora = read_warm_start(plan.served.adapter.path)
    if lora.rank_pattern or lora.alpha_pattern:
        equalise_ranks(folder / WEIGHTS, lora)
        rank, alpha, use_rslora = lora.max_rank, float(lora.max_rank), False
    else:
        rank, alpha, use_rslora = lora.rank, lora.alpha, lora.use_rslora
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": base_name,
        "revision": None if plan.is_base_local else plan.run_config.resolved.model.revision,
        "r": rank,
        "lora_alpha": alpha,
        "lora_dropout": 0.0,
        "use_rslora": use_rslora,
        "target_modules": sorted(plan.manifest.target_modules),
        **({"target_parameters": names} if (names := plan.manifest.target_parameters) else {}),
        "bias": "none",
        "inference_mode": True,
    }
    (folder / CONFIG).write_text(json.dumps(config, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    copy_prompt_files(plan, folder)


def equalise_ranks(file: Path, lora: WarmStart) -> None:
    """Pad every matrix with zeros to the highest rank, and multiply each B by its module's scale, in float32.

    Many engines ignore rank_pattern and alpha_pattern. With alpha = rank this computes the same.
    """
    import torch
    from safetensors.torch import load_file, save_file
    from torch.nn.functional import pad

    tensors = {}
    for name, tensor in load_file(file).items():
        rank = pattern_value(lora.rank_pattern, path_of(name), lora.rank)
        missing = lora.max_rank - rank
        if is_a(name):  # of experts, the A of one are below those of another
            parts = [pad(part, (0, 0, 0, missing)) for part in torch.split(tensor, rank)]
            tensors[name] = torch.cat(parts)
        else:  # and column r E + e of B is column r of expert e
            scaled = tensor.float() * lora.scale_of(path_of(name))
            tensors[name] = pad(scaled, (0, missing * (tensor.shape[1] // rank)))
    save_file(tensors, file, {"format": "pt"})


def copy_prompt_files(plan: ExportPlan, folder: Path) -> None:
    """Copy tokenizer, chat templates and generation settings of the base, with the template of the run.

    Also the settings of its processors: a model with other parts than text still reads pictures or sound.
    """
    files = [*prompt_files(plan.base.path), *model_files(plan.base.path, PROCESSOR_FILES)]
    if check_model_folder(plan.base.path, "").fingerprint != plan.base.fingerprint:
        raise ModelError(f"{plan.base.path} changed during the export.", "Export again.")
    for file in files:
        copy = folder / file.relative_to(plan.base.path)
        copy.parent.mkdir(exist_ok=True)
        shutil.copyfile(file, copy)
    write_template(run_template(plan.run_config), folder)


@dataclass(frozen=True, slots=True)
class Adapted:
    """A base model in float32 with an adapter."""

    model: Any
    base_logprobs: list[list[float]]
    """Of the canary, without the adapter."""
    check: Check
    canary: Canary
    """What merged weights must compute: the trainer's logprobs, or on original weights PEFT's."""
    reference: str
    """Whose these are."""


def load_adapted(plan: ExportPlan, adapter: Path) -> Adapted:
    """The pristine base in float32 with the adapter folder on it, both checked."""
    from peft import PeftModel

    model = load_float32(plan.base.path, plan.run_config.resolved.placement.dtype)
    canary = plan.manifest.canary
    base = _canary_logprobs(plan, model)
    check_base(base, canary)
    with exactly_these_modules():
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    logprobs = _canary_logprobs(plan, adapted)
    by = f"{versions('transformers', 'peft')} in float32"
    check = check_export("adapter weights", by, logprobs, canary, is_exact=True, base=base)
    return Adapted(adapted, base, check, canary, "the trainer's")


def load_on_original(plan: ExportPlan, adapter: Path) -> Adapted:
    """The 16-bit model of a quantised base in float32 with the adapter folder on it.

    Raises ModelError if the base was not made from it.
    """
    from peft import PeftModel

    check_weights(plan.base.path, plan.weights_path)
    model, canary = load_float32(plan.weights_path), plan.manifest.canary
    base = _canary_logprobs(plan, model)
    with exactly_these_modules():
        adapted = PeftModel.from_pretrained(model, str(adapter)).eval()
    logprobs = _canary_logprobs(plan, adapted)
    by = f"{versions('transformers', 'peft')} in float32"
    check = compare_bases(f"adapter on {plan.original_name}", by, logprobs, base, canary)
    canary = canary.model_copy(update={"policy_logprobs": logprobs, "base_logprobs": base})
    return Adapted(adapted, base, check, canary, "PEFT's on these weights")


def write_merged(plan: ExportPlan, folder: Path) -> tuple[list[Check], Canary, list[list[float]]]:
    """Merge in float32, check, cast, save, and check what was saved.

    Returns the checks, the canary that the weights must have, and its logprobs [S][L - 1] with the weights as
    they were cast.
    """
    import torch

    temporary = folder / "adapter"
    try:
        with long_work("loading the base model and the adapter in float32"):
            write_adapter(plan, temporary, str(plan.weights_path))
            load = load_adapted if plan.original is None else load_on_original
            adapted = load(plan, temporary)
    finally:
        remove_tree(temporary)
    canary, base, reference = adapted.canary, adapted.base_logprobs, adapted.reference
    checks = [] if plan.original is None else [adapted.check]
    by = f"{versions('transformers', 'peft')} in float32"
    with long_work("merging"):
        merged = adapted.model.merge_and_unload(safe_merge=True)
        logprobs = _canary_logprobs(plan, merged)
        what = "merged weights before the cast"
        checks.append(check_export(what, by, logprobs, canary, is_exact=True, base=base, reference=reference))
        dtype = getattr(torch, plan.dtype)
        for weight in merged.parameters():  # rounded, but still float32: only the weights are under test
            weight.data = weight.data.to(dtype).float()
        rounded = _canary_logprobs(plan, merged)
        merged.to(dtype).save_pretrained(folder)
    del adapted, merged
    gc.collect()
    copy_prompt_files(plan, folder)
    with long_work("loading the merged model"):
        logprobs = _canary_logprobs(plan, load_float32(folder))
    checks.append(
        check_export(
            f"merged weights in {plan.dtype}",
            f"{versions('transformers')} in float32",
            logprobs,
            canary,
            is_exact=True,
            rounded=None if plan.dtype == "float32" else rounded,
            base=base,
            reference=reference,
        )
    )
    return checks, canary, rounded


def _canary_logprobs(plan: ExportPlan, model: Any) -> list[list[float]]:
    canary = plan.manifest.canary
    return model_logprobs(model, canary.sequences, canary.image, plan.base.path)


def write_template(template: ChatTemplate, folder: Path) -> None:
    """Replace the base's template in `folder` if the run used another, arguments, or a time of its own.

    No file of a model holds arguments of its template, so they become the template's first lines, as the
    time does. Raises ModelError.
    """
    text = text_for_others(template, folder)
    if text is None and not template.args:
        return
    if text is None and (text := own_template(folder)) is None:
        raise ModelError(
            f"The run set arguments of the chat template ({', '.join(template.args)}); the base has none.",
            "Restore the base model's chat template.",
        )
    defaults = "".join(_default(name, value) for name, value in template.args.items())
    (folder / TEMPLATE).write_text(defaults + text, encoding="utf-8")
    (folder / OLD_TEMPLATE).unlink(missing_ok=True)
    tokenizer = parse_json(read_text(folder / TOKENIZER)) if (folder / TOKENIZER).is_file() else {}
    if tokenizer.pop("chat_template", None) is not None:
        write_json(folder / TOKENIZER, tokenizer)


def _default(name: str, value: object) -> str:
    """A line that sets an argument unless the caller gives it."""
    literal = "none" if value is None else json.dumps(value)
    return f"{{%- if {name} is not defined %}}{{%- set {name} = {literal} %}}{{%- endif %}}\n"
