"""Refuses models that no run can train today, from config.json alone, before a process starts."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from skylite.engine.tensor_parallel import text_section
from skylite.errors import ModelError
from skylite.untrusted_text import parse_json

OTHER_PARTS = ("vision_config", "audio_config", "vision_tower_config", "img_processor")
"""Sections of config.json that describe a part which sees no text."""
WRAPPER = "ForConditionalGeneration"
QUANTISED = ("quantization_config", "compression_config")


def check_trainable(model_path: Path) -> None:
    """Raise ModelError for quantised weights, and for a language model inside a multimodal one."""
    config = parse_json((model_path / "config.json").read_text(encoding="utf-8"))
    if (method := quantisation(config)) is not None:
        raise ModelError(
            f"The base {model_path.name} is quantised ({method}), and skylite has no QLoRA: trainer and vLLM "
            "need the same unquantised weights.",
            "Use the 16-bit model that it was made from, and a smaller one if that does not fit.",
        )
    architecture = str((config.get("architectures") or [""])[0])
    if architecture.endswith(WRAPPER) or any(config.get(part) for part in OTHER_PARTS):
        raise ModelError(
            f"{model_path.name} is a {architecture}: a language model inside a multimodal one. skylite "
            "cannot train those yet: trainer and vLLM name the layers differently, and vLLM would leave out "
            "their LoRA.",
            "Choose a text-only model, whose config.json names a ...ForCausalLM.",
        )


def quantisation(config: Mapping[str, Any]) -> str | None:
    """The method that config.json names, such as fp8; None for plain weights."""
    for section in (config, text_section(config)):
        for name in QUANTISED:
            if isinstance(found := section.get(name), dict) and found:
                return str(found.get("quant_method") or name)[:40]
    return None
