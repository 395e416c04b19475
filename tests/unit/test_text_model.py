"""Models that also read pictures: the adapter is on their text model, under the published model's names."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from peft import PeftModel
from safetensors.torch import load_file
from transformers import AutoModelForImageTextToText

from skylite.adapters.manifest import Canary
from skylite.adapters.target_modules import last_names, predict_modules
from skylite.config.lora import LoraConfig
from skylite.config.train import RunConfig
from skylite.engine.model_limits import check_trainable, other_parts_note
from skylite.engine.model_sizes import model_sizes
from skylite.engine.vllm.models import check_lora
from skylite.hub.text_model import model_shapes, other_parts, text_layers, text_tensors
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.float32_arithmetic import Float32Arithmetic
from skylite.model.loading import decoder_layers, text_path
from skylite.model.packing import pack_tokens
from skylite.model.policy import adapted_modules, load_policy, score
from skylite.model.process_group import Dist
from skylite.run.rollout_file import examples_of
from skylite.trainer.publish_adapter import write_adapter
from tests.cases import PROBE, gradients_after_step, policy_of, reference_gradient, relative_difference
from tests.decisions import resolved
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.tiny_models import make_tiny_model

TOWERS = {
    "gemma3_vl": ["multi_modal_projector", "vision_tower"],
    "qwen3_5_vl": ["model.visual"],
    "qwen3_vl": ["model.visual"],
}
CONFIG = {"text_config": {"num_hidden_layers": 2, "hidden_size": 8, "vocab_size": 9}}


@pytest.fixture(scope="module", params=TOWERS)
def model_path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)


def test_the_adapter_is_on_every_linear_module_of_the_text_model_alone(model_path: Path, dist: Dist) -> None:
    base = AutoModelForImageTextToText.from_pretrained(model_path)
    assert text_path(base) == "model.language_model"
    assert len(decoder_layers(base)) == 2
    adapted = adapted_modules(base, LoraConfig())
    linear = {
        name
        for name, module in base.named_modules()
        if isinstance(module, torch.nn.Linear) and name.startswith("model.language_model.")
    }
    assert set(adapted) == linear
    assert {"self_attn.q_proj", "mlp.down_proj"} <= {".".join(n.split(".")[-2:]) for n in adapted}
    by_name = adapted_modules(base, LoraConfig(target_modules=["q_proj", ".*fc1", "proj"]))
    assert last_names(by_name) == ["q_proj"], "the tower has q_proj, fc1 and proj, too"


def test_headers_give_the_adapters_names_and_size(model_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(model_path)
    adapted = adapted_modules(base, LoraConfig())
    assert last_names(predict_modules(model_path, LoraConfig())[1]) == last_names(adapted)
    sizes = model_sizes(model_path, LoraConfig())
    assert sizes.lora_per_rank == sum(sum(base.get_submodule(name).weight.shape) for name in adapted)
    assert (sizes.num_layers, sizes.hidden) == (2, 64)
    assert sizes.vocabulary == len(base.get_input_embeddings().weight)


def test_a_plan_says_what_stays_as_it_is(model_path: Path, tiny_llama: Path) -> None:
    check_trainable(model_path)
    assert f"({', '.join(TOWERS[model_path.name])})" in other_parts_note(model_path, LoraConfig())
    assert other_parts_note(tiny_llama, LoraConfig()) == ""
    check_lora(model_path, "cpu", LoraConfig())


def test_gradients_are_those_of_transformers_and_peft(model_path: Path, dist: Dist) -> None:
    config = settings()
    policy = policy_of(model_path, config, dist)
    base = AutoModelForImageTextToText.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    )
    plain = plain_peft(base, policy)
    got, _ = gradients_after_step(policy, config, dist)
    assert relative_difference(got, reference_gradient(plain, policy, config)) < 1e-4
    frozen = {n for n, p in policy.model.named_parameters() if not p.requires_grad}
    assert any("vis" in name for name in frozen)
    assert not any("vis" in name for name in policy.lora)


def plain_peft(base: torch.nn.Module, policy: object) -> PeftModel:
    from peft import LoraConfig as PeftLoraConfig

    targets = policy.target_modules  # type: ignore[attr-defined]
    config = PeftLoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, target_modules=targets)
    plain = PeftModel(base, config).eval()
    for name, param in plain.named_parameters():
        if param.requires_grad:
            param.data.copy_(policy.lora[name].data)  # type: ignore[attr-defined]
    return plain


def test_attention_alone_is_packed_as_a_tree_and_a_recurrent_layer_as_rows(
    model_path: Path, dist: Dist
) -> None:
    policy, _ = enable_shortcuts(load_policy(resolved(model_path, model_path), settings(), dist), PROBE)
    assert policy.packing == ("padded" if model_path.name == "qwen3_5_vl" else "tree")
    assert policy.lm_head is not None


def test_a_published_folder_gives_peft_the_policys_logprobs(
    model_path: Path, tmp_path: Path, dist: Dist
) -> None:
    config = settings()
    policy = policy_of(model_path, config, dist)
    run_config = RunConfig(skylite_version="test", config=config, resolved=resolved(model_path, tmp_path))
    canary = Canary(sequences=[], policy_logprobs=[], base_logprobs=[])
    folder = write_adapter(policy, run_config, 1, canary).path
    names = load_file(folder / "adapter_model.safetensors")
    assert all(name.startswith("base_model.model.model.language_model.layers.") for name in names)

    examples = examples_of(groups_of(random_samples(0)))
    expected = score(policy, pack_tokens(examples, policy.packing, policy.device), temperature=1.0)[0]
    base = AutoModelForImageTextToText.from_pretrained(
        model_path, dtype=torch.float32, attn_implementation="eager"
    )
    loaded = replace(
        policy, model=PeftModel.from_pretrained(base, str(folder)), packing="padded", lm_head=None
    )
    found = score(loaded, pack_tokens(examples, "padded", policy.device), temperature=1.0)[0]
    torch.testing.assert_close(found, expected, atol=2e-5, rtol=0)


def stack(prefix: str, layers: int, *shape: int) -> dict[str, list[int]]:
    return {f"{prefix}.{i}.{name}.weight": [*shape] for i in range(layers) for name in ("fc1", "fc2", "fc3")}


def test_the_text_models_layers_are_those_of_config_json_and_not_the_largest() -> None:
    shapes = (
        stack("vision_tower.blocks", 5, 64, 64)
        | stack("mtp.layers", 1, 99, 8)
        | stack("language_model.model.layers", 2, 8, 8)
        | {"language_model.model.embed_tokens.weight": [9, 8], "language_model.lm_head.weight": [9, 8]}
        | {"projector.weight": [64, 8]}
    )
    layers = text_layers(shapes, CONFIG)
    assert list(layers) == ["language_model.model.layers.0.", "language_model.model.layers.1."]
    assert set(text_tensors(shapes, CONFIG).values()) == {
        *(f"model.language_model.layers.{i}.{name}.weight" for i in (0, 1) for name in ("fc1", "fc2", "fc3")),
        "model.language_model.embed_tokens.weight",
        "lm_head.weight",
    }


def test_tensors_have_the_names_of_transformers_model(model_path: Path) -> None:
    base = AutoModelForImageTextToText.from_pretrained(model_path)
    own = {n for n, _ in base.named_parameters() if not n.startswith(("model.vi", "model.multi"))}
    assert own <= model_shapes(model_path).keys()
    assert other_parts(model_path) == TOWERS[model_path.name]


def test_a_convolution_after_a_cast_to_its_weights_type_is_computed_in_float32() -> None:
    weight, x = torch.randn(4, 1, 3).bfloat16(), torch.randn(1, 4, 9)
    with Float32Arithmetic():
        found = torch.nn.functional.conv1d(x.to(weight.dtype), weight, groups=4)
    torch.testing.assert_close(found, torch.nn.functional.conv1d(x, weight.float(), groups=4), atol=0, rtol=0)
