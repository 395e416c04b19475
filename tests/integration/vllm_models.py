"""Write skylite/engine/vllm/vllm_models.json: what the installed vLLM can serve with LoRA, by architecture.

    python -m tests.integration.vllm_models        (or: make vllm-models)

It imports every text model of vLLM's registry, which takes about 20 s. Run it when the vLLM version changes.
"""

from __future__ import annotations

import inspect
import json
import logging
import re
import sys
from collections.abc import Iterator
from typing import Any
from unittest.mock import MagicMock

from skylite.engine.vllm.models import TABLE, vllm_version
from skylite.engine.vllm.plugin import no_torchvision
from skylite.hub.resolve import CAUSAL_SUFFIXES
from skylite.hub.text_model import TEXT_PATH

TRANSFORMERS_BACKEND = "TransformersForCausalLM"
"""vLLM's own name for a model whose code comes from transformers."""


STATE = re.compile(r"MambaStateDtypeCalculator\.(\w+)_state_dtype")
"""How a hybrid's class names its recurrent layers."""


def describe() -> dict[str, Any]:
    """The table. Architectures with equal answers share an entry."""
    from vllm.model_executor.models import registry

    no_torchvision.install()
    logging.disable(logging.CRITICAL)
    answers, failed = answer_all(registry, list(text_models(registry)))
    wrappers = [name for name in sorted(answers) if has_text_names(registry, name)]
    answers |= dict.fromkeys(other_models(registry), answers[TRANSFORMERS_BACKEND])
    entries = [
        {**json.loads(text), "architectures": sorted(name for name in answers if answers[name] == text)}
        for text in sorted(set(answers.values()))
    ]
    return {
        "vllm": vllm_version(),
        "entries": entries,
        "wrappers": wrappers,
        "unknown": sorted(failed),
    }


def answer_all(registry: Any, names: list[str]) -> tuple[dict[str, str], dict[str, str]]:
    """Architecture -> answer as JSON, and architecture -> error for those that cannot be imported here."""
    answers, failed = {}, {}
    for name in names:
        try:
            answers[name] = json.dumps(answer(registry.ModelRegistry.models[name].load_model_cls()))
        except (ImportError, RuntimeError) as error:
            failed[name] = str(error)
    return answers, failed


def answer(cls: type) -> dict[str, Any]:
    """What LoRA on a model class of vLLM can change."""
    if not getattr(cls, "supports_lora", False):
        return {"lora": False}
    packed = getattr(cls, "packed_modules_mapping", None) or {}
    fused = {name: list(parts) for name, parts in sorted(packed.items()) if list(parts) != [name]}
    embeddings = sorted(getattr(cls, "embedding_modules", None) or {})
    hybrid = {"hybrid": recurrent_layers(cls)} if getattr(cls, "is_hybrid", False) else {}
    return {"lora": True, "fused": fused, "embeddings": embeddings, **hybrid}


def recurrent_layers(cls: Any) -> str:
    """The kind of a hybrid's recurrent layers, such as gated_delta_net, by its class's state."""
    match = STATE.search(inspect.getsource(cls.get_mamba_state_dtype_from_config))
    return match[1] if match else "unknown"


def has_text_names(registry: Any, architecture: str) -> bool:
    """Whether vLLM's weight mapper leads the names of a multimodal model's text layers to vLLM's own.

    The names are those of transformers' class, which the trainer loads and the adapter has.
    """
    import torch
    import transformers

    cls = getattr(transformers, architecture, None)
    if cls is None or (config := cls.config_class()).get_text_config() is config:
        return False
    served = registry.ModelRegistry.models[architecture].load_model_cls()
    mapper = getattr(served, "hf_to_vllm_mapper", None)
    if mapper is None or not hasattr(served, "get_mm_mapping"):
        return False
    try:
        with torch.device("meta"):
            model = cls(config)
        [prefix] = served.get_mm_mapping(MagicMock()).language_model
    except (AttributeError, TypeError, ValueError, ImportError, RuntimeError, LookupError) as error:
        print(f"{architecture}: {type(error).__name__} {str(error)[:100]}", file=sys.stderr)
        return False
    decoder = model.get_decoder()
    path = next((name for name, module in model.named_modules() if module is decoder), "")
    renamed = mapper.get_rename_mapper().map_name
    linear = {n for n, m in decoder.named_modules() if isinstance(m, torch.nn.Linear) and ".0." in n}
    names = {n: str(renamed(f"{path}.{n}.weight")).removesuffix(".weight") for n in linear}
    mapped = {names[n].removesuffix(f".{n}") for n in linear if names[n].endswith(f".{n}")}
    is_served = all(name.startswith(f"{prefix.rstrip('.')}.") for name in names.values())
    if path == TEXT_PATH and len(mapped) == 1 and is_served:
        return True
    print(f"{architecture}: {path} {prefix} {names}"[:400], file=sys.stderr)
    return False


def text_models(registry: Any) -> Iterator[str]:
    """Architectures in the registry that a model's config.json may name."""
    drafts = registry._SPECULATIVE_DECODING_MODELS
    return (n for n in registry._VLLM_MODELS if n.endswith(CAUSAL_SUFFIXES) and n not in drafts)


def other_models(registry: Any) -> Iterator[str]:
    """Architectures that vLLM does not have itself, and runs with transformers' code."""
    import transformers
    from transformers.models.auto import modeling_auto

    names = {*modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()}
    names |= {*modeling_auto.MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.values()}
    for name in sorted(n for n in names if isinstance(n, str) and n not in registry._VLLM_MODELS):
        cls = getattr(transformers, name)
        if name.endswith(CAUSAL_SUFFIXES) and (
            cls.is_backend_compatible() or cls._can_set_attn_implementation()
        ):
            yield name


def render(table: dict[str, Any]) -> str:
    """The table as JSON, one line an entry."""
    entries = ",\n".join("  " + json.dumps(entry) for entry in table["entries"])
    return (
        f'{{"vllm": {json.dumps(table["vllm"])},\n "entries": [\n{entries}\n ],\n'
        f' "wrappers": {json.dumps(table["wrappers"])},\n "unknown": {json.dumps(table["unknown"])}}}\n'
    )


if __name__ == "__main__":
    table = describe()
    if sys.argv[1:] == ["--print"]:
        print(render(table))
    else:
        TABLE.write_text(render(table), encoding="utf-8")
        print(f"wrote {TABLE}: {sum(len(e['architectures']) for e in table['entries'])} architectures")
