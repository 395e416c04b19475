"""The policy on tiny models: chunked LM head, recomputed activations, attention, refused models."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skylite.config.lora import INITS
from skylite.errors import ModelError
from skylite.model.attention_backends import IMPLEMENTATIONS
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.loading import decoder_layers
from skylite.model.packing import Packing, pack_tokens
from skylite.model.policy import load_policy, score
from skylite.model.process_group import Dist
from tests.cases import (
    PROBE,
    gradients_after_step,
    optimizer_of,
    policy_of,
    relative_difference,
    train_rows,
)
from tests.decisions import resolved
from tests.rows import completions_of, random_samples
from tests.small_run import settings
from tests.tiny_models import FAMILIES, make_tiny_model


def bent_logits_model(folder: Path) -> Path:
    """A Gemma 2 with logit softcapping (tanh), steep enough here to change the result."""
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    config = transformers.Gemma2Config(
        vocab_size=260, head_dim=16, initializer_range=0.1, final_logit_softcapping=2.0, **sizes
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize("family", [*FAMILIES, "gemma2"])
def test_chunked_and_full_logits_give_the_same_gradient(family: str, tmp_path: Path, dist: Dist):
    folder = tmp_path / "model"
    policy = policy_of(
        bent_logits_model(folder) if family == "gemma2" else make_tiny_model(folder, family), settings(), dist
    )
    assert policy.lm_head is not None, "this family's head is linear"
    full, _ = gradients_after_step(replace(policy, lm_head=None), settings(), dist)
    chunked, _ = gradients_after_step(policy, settings(), dist)
    assert relative_difference(chunked, full) < 1e-5


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradient_in_less_memory(
    mode: str, packing: Packing, tmp_path: Path, dist: Dist
):
    model = make_tiny_model(tmp_path / "model", "llama")
    kept: dict[str, int] = {}

    def gradient(checkpointing: str) -> torch.Tensor:
        config = settings(
            trainer={"checkpointing": checkpointing}, lora={"dropout": 0.2 if mode == "full" else 0.0}
        )
        policy = policy_of(model, config, dist, packing)
        seen: dict[int, int] = {}
        with torch.autograd.graph.saved_tensors_hooks(
            lambda t: (seen.update({t.data_ptr(): t.nbytes}), t)[1], lambda t: t
        ):
            found, _ = gradients_after_step(policy, config, dist)
        kept[checkpointing] = sum(seen.values())
        return found

    assert relative_difference(gradient(mode), gradient("none")) < 1e-6
    assert kept[mode] < {"selective": 0.9, "full": 0.75}[mode] * kept["none"]


def test_an_unusual_lm_head_computes_full_logits(tmp_path: Path, dist: Dist):
    torch.manual_seed(0)
    sizes = {
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
    }
    granite = transformers.GraniteConfig(vocab_size=260, initializer_range=0.1, logits_scaling=8.0, **sizes)
    AutoModelForCausalLM.from_config(granite).save_pretrained(tmp_path)
    policy, reasons = enable_shortcuts(load_policy(resolved(tmp_path, tmp_path), settings(), dist), PROBE)
    assert policy.lm_head is None
    assert "head in chunks: False" in reasons[0]


def test_flex_attention_and_sdpa_give_the_same_logprobs_for_each_family(tmp_path: Path, dist: Dist):
    sequences = random_samples(0)
    for family in FAMILIES:
        model, found = make_tiny_model(tmp_path / family, family), []
        for form in ("sdpa", "flex"):
            policy = policy_of(model, settings(trainer={"attention": form}), dist)
            assert policy.packing == "tree", (family, form)
            assert policy.model.get_base_model().config._attn_implementation == IMPLEMENTATIONS[form]
            prompts, completions = (
                [s.prompt_token_ids for s in sequences],
                [s.completion_token_ids for s in sequences],
            )
            tokens = pack_tokens(
                completions_of(prompts, completions, [s.group for s in sequences]), "tree", dist.device
            )
            with torch.no_grad():  # FlexAttention has no backward pass on a CPU
                found.append(score(policy, tokens, temperature=1.0)[0])
        assert torch.allclose(found[0], found[1], atol=1e-5), family


@pytest.mark.parametrize(
    ("family", "window"),
    [
        ("gemma3", "sliding_window"),
        ("qwen2_moe", "sliding_window"),
        ("gpt_oss", "sliding_window"),  # and sinks
        ("llama4_text", "attention_chunk_size"),
        ("deepseek_v3", None),  # values narrower than keys
    ],
)
def test_a_tree_keeps_windows_chunks_sinks_and_latent_heads(
    family: str, window: str | None, tmp_path: Path, dist: Dist
):
    """Windows of 40 are longer than the probe: only the structure tells of them."""
    model = make_tiny_model(tmp_path / family, family)
    rows = random_samples(0, shared=48)
    for length in (8, 40) if window else (8,):
        config_file = model / "config.json"
        values = json.loads(config_file.read_text())
        config_file.write_text(json.dumps(values | ({window: length} if window else {})))
        tree = policy_of(model, settings(), dist)
        assert tree.packing == "tree"
        assert window is None or getattr(tree.model.get_base_model().config, window) == length
        ours, _ = gradients_after_step(tree, settings(), dist, rows)
        plain, _ = gradients_after_step(policy_of(model, settings(), dist, "padded"), settings(), dist, rows)
        assert relative_difference(ours, plain) < 1e-5


@pytest.mark.parametrize("family", ["deepseek_v3", "qwen2_moe", "mixtral"])
def test_experts_get_no_lora_in_place_of_dense_modules(family: str, tmp_path: Path, dist: Dist):
    """PEFT would move the LoRA of DeepSeek's dense and shared MLPs to its experts' parameters."""
    model = make_tiny_model(tmp_path, family)
    policy = load_policy(resolved(model, model, placement={"dtype": "bfloat16"}), settings(), dist)
    modules = {name.partition(".lora_")[0].removeprefix("base_model.model.") for name in policy.lora}
    linear = {n for n, m in policy.model.get_base_model().named_modules() if isinstance(m, BaseTunerLayer)}
    assert modules == linear
    assert not any(".experts" in name for name in modules)
    if family == "deepseek_v3":
        assert {"model.layers.0.mlp.gate_proj", "model.layers.1.mlp.shared_experts.up_proj"} <= modules


def test_a_convolution_along_the_row_never_shares_a_tree(tmp_path: Path, dist: Dist):
    policy = load_policy(resolved(*[make_tiny_model(tmp_path, "lfm2")] * 2), settings(), dist)
    policy, lines = enable_shortcuts(policy, PROBE)
    assert policy.packing == "padded"
    assert any("recurrent layers" in line for line in lines)


def test_a_model_with_custom_attention_is_padded_and_logs_it(tmp_path: Path, dist: Dist):
    torch.manual_seed(0)
    bloom = transformers.BloomConfig(
        vocab_size=260, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.1
    )
    AutoModelForCausalLM.from_config(bloom).save_pretrained(tmp_path)
    policy = load_policy(resolved(tmp_path, tmp_path), settings(), dist)
    policy, reasons = enable_shortcuts(policy, PROBE)
    assert policy.packing == "padded"
    assert reasons[-2].startswith("packing: padded; ")
    assert reasons[-1].startswith("attention of padded rows: ")


def test_target_modules_are_chosen(tiny_llama: Path, dist: Dist):
    def targets(**lora: Any) -> list[str]:
        return load_policy(resolved(tiny_llama, tiny_llama), settings(lora=lora), dist).target_modules

    assert targets() == ["down_proj", "gate_proj", "k_proj", "o_proj", "q_proj", "up_proj", "v_proj"]
    assert targets(target_modules=["q_proj", "v_proj"]) == ["q_proj", "v_proj"]
    assert targets(
        target_modules=[r"model\.layers\.1\..*_proj"],
        exclude_modules=["mlp.*", "gate_proj", "up_proj", "down_proj"],
    ) == [f"model.layers.1.self_attn.{n}_proj" for n in "koqv"]
    with pytest.raises(ModelError, match="down_proj, gate_proj, k_proj"):
        targets(target_modules=["query"])


@pytest.mark.parametrize("init", INITS)
def test_every_initialisation_starts_at_the_base_with_its_own_spread(
    init: str, tiny_llama: Path, dist: Dist
) -> None:
    config = settings(lora={"init": init, "rank": 8})
    policy = load_policy(resolved(tiny_llama, tiny_llama), config, dist)
    (a,) = [p for n, p in policy.lora.items() if "layers.0.mlp.down_proj.lora_A" in n]
    (b,) = [p for n, p in policy.lora.items() if "layers.0.mlp.down_proj.lora_B" in n]
    assert (b @ a).abs().max() < 1e-5
    std = {  # of A [8, 128]: uniform in +-1 / sqrt(128); normal; 0.2; 1 / rank; random combinations / 10
        "default": (1 / 128 / 3) ** 0.5,
        "xavier": (2 / (8 + 128)) ** 0.5,
        "normal": 0.2,
        "gaussian": 1 / 8,
        "orthogonal": (0.5 / 100) ** 0.5,
    }
    assert float(a.detach().std()) == pytest.approx(std[init], rel=0.15)


def test_a_folder_without_a_model_is_refused_in_one_sentence(tmp_path: Path, tiny_llama: Path, dist: Dist):
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(resolved(tmp_path, tmp_path), settings(), dist)
    make_tiny_model(tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="torn"):
        load_policy(resolved(tmp_path / "torn", tmp_path), settings(), dist)


def test_a_model_with_missing_weights_is_refused(tmp_path: Path, dist: Dist):
    weights = make_tiny_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights"):
        load_policy(resolved(tmp_path / "model", tmp_path), settings(), dist)


@pytest.mark.parametrize(
    ("algorithm", "tokens", "extra_passes"),
    [
        ({}, 4096, []),
        ({}, 60, []),
        ({"kl_coef": 0.05}, 60, ["base"]),
        ({"kl_coef": 0.05, "kl_in": "reward"}, 60, ["policy", "base"]),
        ({"updates_per_step": 2}, 4096, ["policy"]),
    ],
)
def test_the_model_runs_once_per_micro_batch_plus_the_precompute_passes(
    algorithm: dict[str, Any], tokens: int, extra_passes: list[str], tiny_llama: Path, dist: Dist
):
    """`extra_passes`: forward passes without a graph, of the policy (old logprobs) or its base (KL)."""
    config = settings(algorithm=algorithm, trainer={"tokens_per_micro_batch": tokens})
    policy = policy_of(tiny_llama, config, dist)
    layer = decoder_layers(policy.model.get_base_model())[0]
    adapted = next(m for m in layer.modules() if isinstance(m, BaseTunerLayer))
    passes: list[tuple[str, bool]] = []

    def note(_: torch.nn.Module, __: Any, output: Any) -> None:
        hidden = output if isinstance(output, torch.Tensor) else output[0]
        passes.append(("base" if adapted.disable_adapters else "policy", hidden.requires_grad))

    layer.register_forward_hook(note)
    train_rows(policy, optimizer_of(policy, config), random_samples(0), 1, config, dist)
    training = passes.count(("policy", True))
    updates = algorithm.get("updates_per_step", 1)
    assert training == updates if tokens == 4096 else training > updates
    assert sorted(passes) == sorted([("policy", True), *((kind, False) for kind in extra_passes)] * training)
