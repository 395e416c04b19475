"""LoRA on the weights of experts: the trainer's products against loops over the experts in plain torch."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import PeftModel
from pydantic import ValidationError
from safetensors.torch import load_file, save_file
from torch.nn import functional
from transformers import AutoModelForCausalLM

from skylite.adapters.experts import BOTH, ExpertSizes, expert_layers, module_of
from skylite.adapters.import_adapter import adopt_adapter, copy_adapter, path_of, read_warm_start
from skylite.adapters.peft_targets import exactly_these_modules
from skylite.adapters.target_modules import check_target_names, predict_modules
from skylite.config.lora import LoraConfig
from skylite.engine.model_sizes import model_sizes
from skylite.errors import ModelError
from skylite.export.weights import equalise_ranks
from skylite.hub.resolve import tensor_shapes
from skylite.model.policy import load_policy, peft_tensor_name
from skylite.run.run_dir import RunDir
from skylite.trainer.publish_adapter import adapter_tensors
from tests.adapter_forms import difference, publish
from tests.cases import (
    gradients_after_step,
    plain_model,
    policy_of,
    reference_gradient,
    relative_difference,
)
from tests.decisions import resolved
from tests.small_run import lone_rank, settings
from tests.tiny_families import make_family
from tests.tiny_models import make_tiny_model


def dense_block(block: Any, path: str, lora: dict[str, torch.Tensor], scale: float) -> None:
    """Make a block of Qwen3-MoE compute every expert for every token, with LoRA added to each expert's
    weights. Of `lora`, row r + e R of A and column r E + e of B belong to expert e and rank r (PEFT)."""
    experts, gate = block.experts, block.gate
    rank, number = 4, experts.num_experts
    assert not gate.norm_topk_prob

    def weight(e: int, name: str, module: str) -> torch.Tensor:
        a, b = lora[f"{path}.{module}.lora_A"], lora[f"{path}.{module}.lora_B"]
        delta = b[:, e::number] @ a[e * rank : (e + 1) * rank]
        return getattr(experts, name)[e] + scale * delta

    def forward(hidden_states: torch.Tensor) -> torch.Tensor:
        x = hidden_states.reshape(-1, hidden_states.shape[-1])
        probabilities = (x @ gate.weight.T).softmax(-1)
        y = torch.zeros_like(x)
        for e in range(number):
            gate_up = x @ weight(e, "gate_up_proj", "experts.base_layer").T
            inner = functional.silu(gate_up[:, : gate_up.shape[1] // 2]) * gate_up[:, gate_up.shape[1] // 2 :]
            out = inner @ weight(e, "down_proj", "experts").T
            is_chosen = (probabilities > probabilities[:, [e]]).sum(-1) < gate.top_k
            share = probabilities[:, e]  # norm_topk_prob is false
            y = y + torch.where(is_chosen, share, 0.0)[:, None] * out
        return y.view_as(hidden_states)

    block.forward = forward


def test_logprobs_and_gradients_are_those_of_a_loop_over_dense_experts(tmp_path: Path) -> None:
    config = settings(lora={"target_parameters": BOTH})
    model = make_tiny_model(tmp_path / "model", "qwen3_moe")
    with lone_rank() as dist:
        policy = policy_of(model, config, dist)
        ours, _ = gradients_after_step(policy, config, dist)
    assert policy.packing == "tree"
    assert sum(".experts." in name for name in policy.lora) == 2 * 2 * 2  # layers, parameters, A and B
    plain = plain_model(model, policy, config)
    named = dict(plain.named_parameters())
    lora = {n.replace(".default.weight", ""): p for n, p in named.items() if ".experts." in n and "lora" in n}
    assert len(lora) == 8
    for index, layer in enumerate(plain.get_base_model().model.layers):
        layer.mlp.experts = layer.mlp.experts.get_base_layer()
        dense_block(layer.mlp, f"base_model.model.model.layers.{index}.mlp", lora, scale=2.0)
    # The parameters of PEFT's wrappers, which are no longer in the model.
    plain.named_parameters = lambda: named.items()
    expected = reference_gradient(plain, policy, config)
    assert relative_difference(ours, expected) < 1e-5


def loop_over_experts(experts: Any, lora: dict[str, torch.Tensor], scale: float) -> Any:
    """The forward of joined experts as a loop over dense ones; `lora` has PEFT's matrices of a layer."""
    number, rank, is_gpt_oss = experts.num_experts, 4, experts.has_bias

    def weight(e: int, name: str, module: str) -> torch.Tensor:
        matrix = getattr(experts, name)[e]
        delta = lora[f"{module}lora_B"][:, e::number] @ lora[f"{module}lora_A"][e * rank : (e + 1) * rank]
        return (matrix.T if is_gpt_oss else matrix) + scale * delta

    def forward(x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        y = torch.zeros_like(x)
        for e in range(number):
            both = x @ weight(e, "gate_up_proj", "base_layer.").T
            if is_gpt_oss:
                both = both + experts.gate_up_proj_bias[e]
                gate, up = both[:, ::2].clamp(max=7.0), both[:, 1::2].clamp(-7.0, 7.0)
                inner = (up + 1) * gate * torch.sigmoid(1.702 * gate)
            else:
                gate, up = both.chunk(2, dim=-1)
                inner = functional.silu(gate) * up
            out = inner @ weight(e, "down_proj", "").T
            out = out + experts.down_proj_bias[e] if is_gpt_oss else out
            y = y + ((index == e) * weights).sum(-1, keepdim=True) * out
        return y

    return forward


@pytest.mark.parametrize("family", ["gpt_oss", "glm4_moe"])
def test_gradients_of_other_families_are_those_of_a_loop_over_their_experts(
    family: str, tmp_path: Path
) -> None:
    """With biases, a clamp and transposed matrices; beside a dense layer and a shared expert."""
    config, model = settings(lora={"target_parameters": BOTH}), make_family(tmp_path / "model", family)
    with lone_rank() as dist:
        policy = policy_of(model, config, dist)
        ours, _ = gradients_after_step(policy, config, dist)
    with exactly_these_modules():
        plain = plain_model(model, policy, config)
    named = dict(plain.named_parameters())
    paths = [n for n, m in plain.named_modules() if n.endswith(".experts") and hasattr(m, "get_base_layer")]
    assert paths
    for path in paths:
        experts = plain.get_submodule(path).get_base_layer()
        lora = {n.removeprefix(f"{path}.").replace(".default.weight", ""): p for n, p in named.items()
                if n.startswith(f"{path}.")}  # fmt: skip
        experts.forward = loop_over_experts(experts, lora, scale=2.0)
        plain.get_submodule(path.rpartition(".")[0]).experts = experts
    plain.named_parameters = lambda: named.items()
    expected = reference_gradient(plain, policy, config)
    assert relative_difference(ours, expected) < 1e-5


def test_an_adapter_beside_a_dense_layer_loads_with_exactly_its_modules(tmp_path: Path) -> None:
    """PEFT alone takes DeepSeek-V3's dense gate_proj for that of experts; export does not let it."""
    model = make_tiny_model(tmp_path / "model", "deepseek_v3")
    adapter, logprobs = publish("plain", model, tmp_path / "adapters", target_parameters=BOTH)

    def load() -> Any:
        return PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), str(adapter)).eval()

    with exactly_these_modules():
        assert difference(logprobs, load()) < 1e-5
    with pytest.raises(RuntimeError, match="size mismatch"):
        load()


@pytest.fixture(scope="module")
def moe(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "moe", "qwen3_moe")


FORMS: dict[str, dict[str, Any]] = {
    "with attention": {},
    "one layer": {"target_parameters": [f"layers.1.mlp.{name}" for name in BOTH]},
    "ranks, alphas, rslora": {
        "rank_pattern": {"experts.*": 2, "q_proj": 8},
        "alpha_pattern": {"experts.*": 3},
        "use_rslora": True,
    },
}


@pytest.fixture(scope="module")
def published(moe: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[list[float]]]:
    """An adapter of experts alone, and the trainer's logprobs."""
    return publish(
        "plain", moe, tmp_path_factory.mktemp("adapters"), target_parameters=BOTH, target_modules=[]
    )


def copy_of(adapter: Path, folder: Path) -> Path:
    return Path(shutil.copytree(adapter, folder / "copy"))


@pytest.mark.parametrize("name", FORMS)
def test_peft_computes_the_logprobs_and_a_run_continues_from_the_same_bits(
    name: str, moe: Path, tmp_path: Path
) -> None:
    form = {"target_parameters": BOTH} | FORMS[name]
    adapter, logprobs = publish("plain", moe, tmp_path / "adapters", **form)
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe), str(adapter)).eval()
    assert difference(logprobs, model) < 1e-5
    with model.disable_adapter():
        assert difference(logprobs, model) > 0.01, "the adapter changes the model"

    config, _ = adopt_adapter(settings(lora={"from_adapter": str(adapter)}), (), moe)
    assert config.lora.target_parameters == form["target_parameters"]
    run = RunDir(tmp_path / "run")
    copy_adapter(adapter, run.warm_start)
    started = resolved(moe, tmp_path, identity={"warm_start": run.warm_start})
    with lone_rank() as dist:
        continued = adapter_tensors(load_policy(started, config, dist))
    published = load_file(adapter / "adapter_model.safetensors")
    assert published.keys() == continued.keys()
    assert all(torch.equal(published[key], tensor) for key, tensor in continued.items())


def test_an_export_without_patterns_computes_the_same(moe: Path, tmp_path: Path) -> None:
    form = FORMS["ranks, alphas, rslora"] | {"target_parameters": BOTH}
    adapter, logprobs = publish("plain", moe, tmp_path / "adapters", **form)
    lora = read_warm_start(adapter)
    equalise_ranks(adapter / "adapter_model.safetensors", lora)
    config = json.loads((adapter / "adapter_config.json").read_text())
    plain = {"r": 8, "lora_alpha": 8, "use_rslora": False, "rank_pattern": {}, "alpha_pattern": {}}
    (adapter / "adapter_config.json").write_text(json.dumps(config | plain))
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe), str(adapter)).eval()
    assert difference(logprobs, model) < 1e-5


def test_a_merged_model_has_the_weights_of_base_and_adapter(
    published: tuple[Path, list[list[float]]], moe: Path, tmp_path: Path
) -> None:
    """Saved in the published layout: a matrix for each expert, as vLLM and transformers read it."""
    adapter, logprobs = published
    model = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(moe), str(adapter))
    model.merge_and_unload(safe_merge=True).save_pretrained(tmp_path / "merged")
    assert tensor_shapes(tmp_path / "merged").keys() == tensor_shapes(moe).keys()
    assert difference(logprobs, AutoModelForCausalLM.from_pretrained(tmp_path / "merged")) < 1e-5


@pytest.mark.parametrize("family", ["qwen3_moe", "qwen2_moe", "deepseek_v3", "gpt_oss"])
def test_headers_predict_the_experts_and_their_size(family: str, tmp_path: Path) -> None:
    model = make_tiny_model(tmp_path / "model", family)
    config = settings(lora={"target_parameters": BOTH})
    with lone_rank() as dist:
        policy = load_policy(resolved(model, model), config, dist)
    paths = {module_of(path_of(peft_tensor_name(name))) for name in policy.lora}
    assert predict_modules(model, config.lora)[1] == paths
    assert any(path.endswith("experts") for path in paths)
    size = sum(p.numel() for p in policy.lora.values())
    assert model_sizes(model, config.lora).lora == size


def test_all_initialisations_leave_the_base_unchanged_and_each_expert_gets_its_own_scale(moe: Path) -> None:
    lora = {"target_parameters": BOTH, "init": "xavier", "rank": 32, "target_modules": []}
    with lone_rank() as dist:
        policy = load_policy(resolved(moe, moe), settings(lora=lora), dist)
    for name, param in policy.lora.items():
        if "lora_B" in name:
            assert not param.any()
        else:  # std of Xavier for a matrix [rank, in] of one expert, not for those of all
            assert param.std().item() == pytest.approx((2 / (32 + param.shape[1])) ** 0.5, rel=0.1)


@pytest.mark.parametrize(
    ("names", "sentence"),
    [
        (["experts.down_proj"], "leaves out gate_up_proj of model.layers.0.mlp.experts.*Use"),
        (["mlp.gate.weight", *BOTH], "'mlp.gate.weight', which matches no expert weights"),
        (["expert.gate_up_proj"], r"matches no expert weights.*Use \['experts.gate_up_proj', 'experts.down"),
    ],
)
def test_other_parameters_are_refused_before_anything_starts(
    names: list[str], sentence: str, moe: Path
) -> None:
    with pytest.raises(ModelError) as error:
        check_target_names(moe, LoraConfig(target_parameters=names))
    assert re.search(sentence, str(error.value), re.DOTALL)


def test_a_model_without_experts_a_dropout_and_a_pattern_of_half_are_refused(
    moe: Path, tiny_llama: Path
) -> None:
    with pytest.raises(ModelError, match="finds no experts that can have LoRA"):
        check_target_names(tiny_llama, LoraConfig(target_parameters=BOTH))
    with pytest.raises(ValidationError, match=r"lora.dropout=0.1: PEFT has no dropout for expert weights"):
        LoraConfig(target_parameters=BOTH, dropout=0.1)
    with pytest.raises(ValidationError, match='"orthogonal" is not there for target_parameters'):
        LoraConfig(target_parameters=BOTH, init="orthogonal")
    pattern = LoraConfig(target_parameters=BOTH, rank_pattern={r"layers\.1\..*_proj": 8})
    with pytest.raises(ModelError, match=r"lora.rank_pattern matches only some .* Name experts in it as"):
        check_target_names(moe, pattern)


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"target_parameters": ["lm_head.weight"]}, "matches no expert weights"),
        ({"r": 3}, "of rank 16, but its adapter_config.json says 3"),
        ({"r": 2}, "which does not fit this model's experts"),
    ],
)
def test_an_adapter_of_other_experts_is_refused(
    change: dict[str, Any],
    sentence: str,
    published: tuple[Path, list[list[float]]],
    moe: Path,
    tmp_path: Path,
) -> None:
    adapter = copy_of(published[0], tmp_path)
    config = json.loads((adapter / "adapter_config.json").read_text())
    (adapter / "adapter_config.json").write_text(json.dumps(config | change))
    with pytest.raises(ModelError) as error:
        adopt_adapter(settings(lora={"from_adapter": str(adapter)}), (), moe)
    assert sentence in str(error.value)


def test_lora_on_single_experts_is_refused_for_an_adapter_of_transformers_4(
    published: tuple[Path, list[list[float]]], moe: Path, tmp_path: Path
) -> None:
    adapter = copy_of(published[0], tmp_path)
    weights = adapter / "adapter_model.safetensors"
    name = "base_model.model.model.layers.0.mlp.experts.2.gate_proj.lora_{}.weight"
    save_file(
        load_file(weights) | {name.format("A"): torch.ones(4, 64), name.format("B"): torch.ones(32, 4)},
        weights,
    )
    (adapter / "manifest.json").unlink()
    with pytest.raises(ModelError, match=r"has LoRA on single experts .*experts.2.gate_proj"):
        adopt_adapter(settings(lora={"from_adapter": str(adapter)}), (), moe)


def test_sizes_are_read_from_tensors_of_all_experts_too() -> None:
    """[E, 2 inner, hidden], as in Qwen3.5's files, or with the last two exchanged, as in gpt-oss'."""
    expected = {"a.experts": ExpertSizes(number=3, hidden=10, inner=4)}
    shapes = {
        "a.experts.gate_up_proj": [3, 8, 10],
        "a.experts.down_proj": [3, 10, 4],
        "a.gate.weight": [3, 10],
    }
    assert expert_layers(shapes) == expected
    assert expert_layers({name: [*shape[:1], *shape[:0:-1]] for name, shape in shapes.items()}) == expected
    one = {f"a.experts.{i}.{n}_proj.weight": [4, 10] for i in range(3) for n in ("gate", "up")}
    assert expert_layers(one) == expected
    assert expected["a.experts"].lora_per_rank == 3 * (10 + 8 + 4 + 10)
    assert expected["a.experts"].slots_per_rank == 3 * (10 + 4 + 10 + 4 + 4 + 10)
