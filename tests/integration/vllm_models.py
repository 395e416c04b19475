"""Write skylite/engine/vllm/vllm_models.json: what the installed vLLM can serve with LoRA, by architecture.

    python -m tests.integration.vllm_models        (or: make vllm-models)

It imports every text model of vLLM's registry, which takes about 20 s. Run it when the vLLM version changes.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any
from unittest.mock import MagicMock

from skylite.engine.vllm.models import TABLE, vllm_version
from skylite.hub.resolve import CAUSAL_SUFFIXES

TRANSFORMERS_BACKEND = "TransformersForCausalLM"
"""vLLM's own name for a model whose code comes from transformers."""


class Stub:
    """Finds torchvision where it is not installed: model classes only need to be imported here."""

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> ModuleSpec | None:
        return ModuleSpec(name, self, is_package=True) if name.split(".")[0] == "torchvision" else None  # type: ignore[arg-type]

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        module = MagicMock(name=spec.name)
        module.__spec__, module.__path__, module.__version__ = spec, [], "0.27.0"
        return module

    def exec_module(self, module: ModuleType) -> None: ...


def describe() -> dict[str, Any]:
    """The table. Architectures with equal answers share an entry."""
    from vllm.model_executor.models import registry

    logging.disable(logging.CRITICAL)
    answers, failed = answer_all(registry, list(text_models(registry)))
    torchvision = [name for name, error in failed.items() if "torchvision" in error]
    if torchvision:
        sys.meta_path.append(Stub())
        found, still_failed = answer_all(registry, torchvision)
        answers, failed = answers | found, {n: e for n, e in failed.items() if n not in found} | still_failed
    answers |= dict.fromkeys(other_models(registry), answers[TRANSFORMERS_BACKEND])
    entries = [
        {**json.loads(text), "architectures": sorted(name for name in answers if answers[name] == text)}
        for text in sorted(set(answers.values()))
    ]
    return {
        "vllm": vllm_version(),
        "entries": entries,
        "torchvision": sorted(torchvision),
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
    hybrid = {"hybrid": True} if getattr(cls, "is_hybrid", False) else {}
    return {"lora": True, "fused": fused, "embeddings": embeddings, **hybrid}


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
        f' "torchvision": {json.dumps(table["torchvision"])},\n "unknown": {json.dumps(table["unknown"])}}}\n'
    )


if __name__ == "__main__":
    table = describe()
    if sys.argv[1:] == ["--print"]:
        print(render(table))
    else:
        TABLE.write_text(render(table), encoding="utf-8")
        print(f"wrote {TABLE}: {sum(len(e['architectures']) for e in table['entries'])} architectures")
