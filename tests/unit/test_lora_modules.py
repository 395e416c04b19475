"""The modules read from file headers to start vLLM are those that the trainer adapts."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError
from safetensors.numpy import save_file

from skylite.adapters.target_modules import (
    check_target_names,
    matches,
    predict_modules,
    predict_target_modules,
    short_names,
)
from skylite.config.lora import LoraConfig
from skylite.engine.model_sizes import model_sizes
from skylite.errors import ModelError
from skylite.model.policy import adapted_modules
from tests.tiny_models import FAMILIES, OTHER_FAMILIES, make_tiny_model

SETTINGS: dict[str, dict[str, Any]] = {
    "all": {},
    "without one": {"exclude_modules": ["down_proj"]},
    "by name": {"target_modules": ["q_proj", "v_proj", "query_key_value", "qkv_proj", "q_a_proj"]},
    "by path": {"target_modules": [r".*\.layers\.1\..*(_proj|_key_value)"]},
    "embedding": {"target_modules": ["embed_tokens", "embed_in", "o_proj"]},
    "wildcard": {"target_modules": ["*.layers.0.*"], "exclude_modules": ["*_proj_with_mqa"]},
    "megatron": {"target_modules": ["linear_qkv", "linear_q_up_proj", "*.layers.1.*.linear_fc2"]},
}


@pytest.fixture(scope="module", params=[*FAMILIES, *OTHER_FAMILIES, "llama4_text"])
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


@pytest.mark.parametrize("name", SETTINGS)
def test_headers_name_the_modules_that_the_trainer_adapts(model_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = LoraConfig.model_validate(SETTINGS[name])
    model = AutoModelForCausalLM.from_pretrained(model_path)
    trainers = short_names((n for n, _ in model.named_modules()), adapted_modules(model, config))
    assert predict_target_modules(model_path, config) == trainers
    assert trainers


@pytest.mark.parametrize("name", SETTINGS)
def test_the_adapter_has_the_predicted_size(model_path: Path, name: str) -> None:
    from transformers import AutoModelForCausalLM

    config = LoraConfig.model_validate(SETTINGS[name])
    model = AutoModelForCausalLM.from_pretrained(model_path)
    shapes = [model.get_submodule(name).weight.shape for name in adapted_modules(model, config)]
    assert model_sizes(model_path, config).lora_per_rank == sum(map(sum, shapes))


def test_the_modules_are_every_part_of_a_path_but_the_parameter(model_path: Path) -> None:
    modules, adapted = predict_modules(model_path, LoraConfig())
    assert "" not in modules
    assert any(name.endswith(".layers.0") for name in modules)
    assert any("embed" in name for name in modules)
    assert adapted <= modules
    assert not any(name.endswith((".weight", ".bias")) for name in modules)


@pytest.mark.parametrize("targets", ["all-linear", ["*.layers.*"]])
@pytest.mark.parametrize(
    ("family", "router"),
    [("jamba", "router"), ("qwen2_moe", "shared_expert_gate"), ("deepseek_v3", "kv_b_proj")],
)
def test_a_linear_layer_that_engines_compute_without_lora_gets_none(
    family: str, router: str, targets: str | list[str], tmp_path: Path
) -> None:
    from transformers import AutoModelForCausalLM

    folder = make_tiny_model(tmp_path / "model", family)
    model = AutoModelForCausalLM.from_pretrained(folder)
    config = LoraConfig.model_validate({"target_modules": targets})
    adapted = adapted_modules(model, config)
    assert set(adapted) == predict_modules(folder, config)[1]
    assert router in {name.rpartition(".")[2] for name, _ in model.named_modules()}
    assert not any(router in name for name in adapted)


def test_a_short_name_selects_exactly_the_chosen_modules() -> None:
    modules = ["a.0.q", "a.1.q", "a.0.k", "b.q"]
    assert short_names(modules, ["a.0.q", "a.1.q", "b.q"]) == ["q"]
    assert short_names(modules, ["a.0.q", "a.0.k"]) == ["a.0.q", "k"]


def test_megatron_names_and_wildcards_select_as_they_do_there() -> None:
    layers = [f"model.layers.{n}" for n in range(11)]
    parts = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj", "mlp.gate_proj",
             "mlp.up_proj", "mlp.down_proj")  # fmt: skip
    paths = [f"{layer}.{part}" for layer in layers for part in parts]

    def selected(*patterns: str) -> set[str]:
        return {path for path in paths if matches(path, patterns)}

    assert selected("*.layers.1.*.linear_qkv") == {f"model.layers.1.self_attn.{n}_proj" for n in "qkv"}
    assert selected("linear_qkv", "linear_proj", "linear_fc1", "linear_fc2") == set(paths)
    canonical = ("linear_q", "linear_k", "linear_v", "linear_proj", "linear_fc1_up", "linear_fc1_gate")
    assert selected(*canonical, "linear_fc2") == set(paths)
    assert selected("linear_fc1_gate") == {f"{layer}.mlp.gate_proj" for layer in layers}
    assert selected("*.layers.1.*") == {path for path in paths if path.startswith("model.layers.1.")}
    assert selected("*.linear_q_up_proj", "*.decoder.*") == set()


@pytest.mark.parametrize(
    ("lora", "words"),
    [
        ({"target_modules": ["q_proj", "k_prj"]}, r"'k_prj', which matches no module.*mean 'k_proj'"),
        ({"target_modules": ["*.layers.9.*"]}, r"\*\.layers\.9\.\*.*matches no module"),
        ({"rank_pattern": {"q_prj": 4}}, r"rank_pattern names 'q_prj'.*mean 'q_proj'"),
        ({"target_modules": ["q_proj"], "alpha_pattern": {"v_proj": 4}}, "alpha_pattern names 'v_proj'"),
        ({"target_modules": ["q_proj"], "rank_pattern": {"(q+)+x": 4}}, "rank_pattern names"),
    ],
)
def test_a_name_that_matches_nothing_is_refused(lora: dict[str, Any], words: str, tiny_llama: Path) -> None:
    with pytest.raises(ModelError, match=f"(?s){words}"):
        check_target_names(tiny_llama, LoraConfig.model_validate(lora))


def test_mambas_out_proj_routers_and_norms_with_a_matrix_get_no_lora(tmp_path: Path) -> None:
    layer = "model.layers.0."
    names = ["mamba.in_proj", "mamba.out_proj", "self_attn.q_norm", "self_attn.q_proj", "feed_forward.gate"]
    tensors = {f"{layer}{name}.weight": np.zeros((2, 2), np.float32) for name in names}
    tensors["model.per_layer_projection.weight"] = np.zeros((2, 2), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")

    def adapted(model_type: str) -> list[str]:
        (tmp_path / "config.json").write_text(json.dumps({"model_type": model_type}))
        return sorted(name.removeprefix(layer) for name in predict_modules(tmp_path, LoraConfig())[1])

    assert adapted("falcon_h1") == ["mamba.in_proj", "self_attn.q_proj"]
    with pytest.raises(ModelError, match="'out_proj', which matches no module"):
        check_target_names(tmp_path, LoraConfig(target_modules=["q_proj", "out_proj"]))
    assert adapted("bamba") == ["mamba.in_proj", "mamba.out_proj", "self_attn.q_proj"]


def test_the_critic_takes_no_lm_head(tiny_llama: Path) -> None:
    assert check_target_names(tiny_llama, LoraConfig(target_modules=["*.layers.*"]), "critic") == []
    for targets in (["q_proj", "lm_head"], ["*"]):
        with pytest.raises(ModelError, match=r"critic\.target_modules=.*LM head"):
            check_target_names(tiny_llama, LoraConfig(target_modules=targets), "critic")


def test_an_odd_rank_cannot_start_orthogonal() -> None:
    LoraConfig(rank=4, init="orthogonal")
    for lora in ({"rank": 3}, {"rank_pattern": {"q_proj": 5}}):
        with pytest.raises(ValidationError, match="even ranks"):
            LoraConfig.model_validate(lora | {"init": "orthogonal"})
