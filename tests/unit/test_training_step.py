"""train_step on real tiny models against the plain reference, and its independence of how the batch is cut."""

from __future__ import annotations

import copy
import json
import random
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from peft.tuners.tuners_utils import BaseTunerLayer
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from skylite.errors import ModelError, TrainingDiverged
from skylite.model.distributed import Dist
from skylite.model.loading import decoder_layers
from skylite.model.packing import Packing, pack_tokens
from skylite.model.policy import load_policy, score
from skylite.model.probing import enable_fast_paths
from skylite.trainer.publish import adapter_tensors
from tests.cases import (
    ALGORITHMS,
    IMPORTANCE,
    PROBE,
    gradients_after_step,
    optimizer_of,
    plain_model,
    policy_of,
    reference_gradient,
    relative_difference,
    train_rows,
)
from tests.reference import (
    lone_rank,
    random_samples,
    reference_before,
    reference_logprobs,
    reference_loss,
    resolved,
    settings,
)
from tests.tiny_models import FAMILIES, make_tiny_model


@pytest.fixture(scope="module")
def dist() -> Iterator[Dist]:
    with lone_rank() as dist:
        yield dist


def sliding_window_model(folder: Path) -> Path:
    """A Mistral that sees six tokens back, so that its window cuts through prefix, prompt and completion."""
    make_tiny_model(folder, "mistral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 6}))
    return folder


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral-window"])
def test_gradients_equal_the_plain_reference(family: str, packing: Packing, tmp_path: Path, dist: Dist):
    folder = tmp_path / "model"
    model = sliding_window_model(folder) if family == "mistral-window" else make_tiny_model(folder, family)
    config = settings(rollout={"temperature": 0.8}, algorithm={"kl_coef": 0.05})
    policy = policy_of(model, config, dist, packing)
    got, metrics = gradients_after_step(policy, config, dist)
    expected = reference_gradient(plain_model(model, policy, config), policy, config)
    assert relative_difference(got, expected) < 1e-5
    assert metrics["optim/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_over_a_bfloat16_base_the_adapter_learns_in_float32(family: str, tmp_path: Path, dist: Dist):
    model, config = make_tiny_model(tmp_path / "model", family), settings()
    policy = policy_of(model, config, dist, dtype="bfloat16")
    optimizer = optimizer_of(policy, config)
    train_rows(policy, optimizer, random_samples(0), 1, config, dist)
    assert {p.dtype for n, p in policy.model.named_parameters() if n not in policy.lora} == {torch.bfloat16}
    moments = [state[m] for state in optimizer.adamw.state.values() for m in ("exp_avg", "exp_avg_sq")]
    assert len(moments) == 2 * len(policy.lora)
    assert {t.dtype for t in [*policy.lora.values(), *(p.grad for p in policy.lora.values()), *moments]} == {
        torch.float32
    }
    expected, _ = gradients_after_step(policy_of(model, config, dist), config, dist)
    # bfloat16 has 8 bits; what the rounding costs over two layers is some percent, a wrong cast or scale would cost tens.
    assert 1e-4 < relative_difference(optimizer.grads, expected) < 0.05


@pytest.mark.parametrize("budget", [4096, 40], ids=["one pass", "many passes"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_gradient_of_the_plain_reference(
    name: str, budget: int, tiny_llama: Path, dist: Dist
):
    config = settings(algorithm=ALGORITHMS[name], trainer={"tokens_per_micro_batch": budget})
    policy = policy_of(tiny_llama, config, dist)
    got, _ = gradients_after_step(policy, config, dist)
    assert (
        relative_difference(got, reference_gradient(plain_model(tiny_llama, policy, config), policy, config))
        < 1e-5
    )


@pytest.mark.parametrize("name", IMPORTANCE)
def test_every_correction_has_the_gradient_of_the_plain_reference(name: str, tiny_llama: Path, dist: Dist):
    config = settings(importance=IMPORTANCE[name], trainer={"tokens_per_micro_batch": 40})
    policy = policy_of(tiny_llama, config, dist)
    got, _ = gradients_after_step(policy, config, dist)
    expected = reference_gradient(plain_model(tiny_llama, policy, config), policy, config)
    assert relative_difference(got, expected) < 1e-5
    plain = settings()
    assert (
        relative_difference(
            gradients_after_step(policy_of(tiny_llama, plain, dist), plain, dist)[0], expected
        )
        > 1e-3
    )


@pytest.mark.parametrize("order", [1, 2])
def test_the_order_of_the_samples_does_not_matter(order: int, tiny_llama: Path, dist: Dist):
    config = settings(algorithm={"name": "kl_cov", "cov_frac": 0.2}, trainer={"tokens_per_micro_batch": 40})
    policy, samples = policy_of(tiny_llama, config, dist), random_samples(0)
    expected, _ = gradients_after_step(policy, config, dist)
    random.Random(order).shuffle(samples)
    optimizer = optimizer_of(policy, config)
    train_rows(policy, optimizer, samples, 1, config, dist)
    assert relative_difference(optimizer.grads, expected) < 1e-5


def bent_logits_model(folder: Path) -> Path:
    """A Gemma 2, whose logits go through a tanh; so steep here that it matters."""
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
def test_logits_in_chunks_and_whole_give_the_same_gradient(family: str, tmp_path: Path, dist: Dist):
    folder = tmp_path / "model"
    policy = policy_of(
        bent_logits_model(folder) if family == "gemma2" else make_tiny_model(folder, family), settings(), dist
    )
    assert policy.head is not None, "this family's head is linear"
    whole, _ = gradients_after_step(replace(policy, head=None), settings(), dist)
    chunked, _ = gradients_after_step(policy, settings(), dist)
    assert relative_difference(chunked, whole) < 1e-5


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("mode", ["selective", "full"])
def test_recomputed_activations_give_the_same_gradient_and_keep_less(
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


def test_a_head_with_a_twist_of_its_own_gets_all_its_logits(tmp_path: Path, dist: Dist):
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
    policy, reasons = enable_fast_paths(load_policy(resolved(tmp_path, tmp_path), settings(), dist), PROBE)
    assert policy.head is None
    assert "head in chunks: False" in reasons[0]


def test_a_tree_is_chosen_for_each_family_and_computes_fewer_tokens(tmp_path: Path, dist: Dist):
    for family in FAMILIES:
        policy = policy_of(make_tiny_model(tmp_path / family, family), settings(), dist)
        assert policy.packing == "tree", family
        _, metrics = gradients_after_step(policy, settings(), dist)
        assert metrics["tokens/unique"] < 0.5 * metrics["tokens/total"]


def test_flex_attention_gives_the_logprobs_of_the_pieces_for_each_family(tmp_path: Path, dist: Dist):
    sequences = random_samples(0)
    for family in FAMILIES:
        model, found = make_tiny_model(tmp_path / family, family), []
        for form in ("sdpa", "flex"):
            policy = policy_of(model, settings(trainer={"attention": form}), dist)
            assert policy.packing == "tree", (family, form)
            assert policy.model.get_base_model().config._attn_implementation == f"skylite_tree_{form}"
            prompts, completions = (
                [s.prompt_token_ids for s in sequences],
                [s.completion_token_ids for s in sequences],
            )
            tokens = pack_tokens(prompts, completions, [s.group for s in sequences], "tree", dist.device)
            with torch.no_grad():  # FlexAttention has no backward pass on a CPU
                found.append(score(policy, tokens, temperature=1.0)[0])
        assert torch.allclose(found[0], found[1], atol=1e-5), family


def test_a_model_with_attention_of_its_own_is_padded_and_said_so(tmp_path: Path, dist: Dist):
    torch.manual_seed(0)
    bloom = transformers.BloomConfig(
        vocab_size=260, hidden_size=64, n_layer=2, n_head=2, initializer_range=0.1
    )
    AutoModelForCausalLM.from_config(bloom).save_pretrained(tmp_path)
    policy = load_policy(resolved(tmp_path, tmp_path), settings(), dist)
    policy, reasons = enable_fast_paths(policy, PROBE)
    assert policy.packing == "padded"
    assert "packing: padded; " in reasons[-1]


def test_metrics_equal_the_plain_reference(tiny_llama: Path, dist: Dist):
    config = settings(algorithm={"kl_coef": 1e-9})  # so that every group is computed
    policy = policy_of(tiny_llama, config, dist)
    _, metrics = gradients_after_step(policy, config, dist)
    plain, samples = plain_model(tiny_llama, policy, config), random_samples(0)
    with torch.no_grad():
        gaps = torch.cat(
            [reference_logprobs(plain, s, 1.0) - torch.tensor(s.rollout_logprobs) for s in samples]
        ).abs()
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(float(gaps.max()), rel=1e-4)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)
    assert metrics["groups/zero_std_frac"] == pytest.approx(0.25)
    assert metrics["tokens/completion"] == sum(len(s.completion_token_ids) for s in samples)


@pytest.mark.parametrize(
    "algorithm", [{}, {"updates_per_step": 2}, {"name": "dr_grpo"}, {"name": "reinforce++"}, {"name": "gspo"}]
)
def test_the_update_does_not_depend_on_how_the_batch_is_cut(
    tiny_llama: Path, dist: Dist, algorithm: dict[str, Any]
):
    gradients = []
    for budget in (4096, 60, 16):
        config = settings(algorithm=algorithm, trainer={"tokens_per_micro_batch": budget})
        gradients.append(gradients_after_step(policy_of(tiny_llama, config, dist), config, dist)[0])
    for other in gradients[1:]:
        assert relative_difference(other, gradients[0]) < 1e-5


def test_groups_without_a_difference_are_skipped_without_changing_the_update(tiny_llama: Path, dist: Dist):
    skipping, whole = settings(), settings(algorithm={"kl_coef": 1e-12})
    a, metrics_a = gradients_after_step(policy_of(tiny_llama, skipping, dist), skipping, dist)
    b, metrics_b = gradients_after_step(policy_of(tiny_llama, whole, dist), whole, dist)
    assert metrics_a["tokens/unique"] < metrics_b["tokens/unique"]
    assert torch.allclose(a, b, atol=1e-6)
    assert metrics_a["loss/policy"] == pytest.approx(metrics_b["loss/policy"], abs=1e-6)


@pytest.mark.parametrize(
    "algorithm",
    [{}, {"name": "gspo", "clip_eps_low": 0.02, "clip_eps_high": 0.02}, {"name": "kl_cov", "cov_frac": 0.3}],
)
def test_two_updates_a_step_equal_the_reference(algorithm: dict[str, Any], tiny_llama: Path, dist: Dist):
    bounds = {"clip_eps_high": 0.05, "clip_eps_low": 0.05}
    config = settings(algorithm={"updates_per_step": 2, **bounds, **algorithm}, optim={"lr": 0.02})
    policy, samples = policy_of(tiny_llama, config, dist), random_samples(0)
    plain = plain_model(tiny_llama, policy, config)
    lora = [p for p in plain.parameters() if p.requires_grad]
    start = torch.cat([p.detach().flatten() for p in policy.lora.values()])
    metrics = train_rows(policy, optimizer_of(policy, config), samples, 1, config, dist)
    before = reference_before(plain, samples, config)
    optimizer = torch.optim.AdamW(lora, lr=0.02, betas=(0.9, 0.99), weight_decay=0.0)
    for part in (range(8), range(8, 16)):
        optimizer.zero_grad()
        reference_loss(plain, samples, part, config, before).backward()
        optimizer.step()
    parameters = dict(plain.named_parameters())
    moved = torch.cat([p.detach().flatten() for p in policy.lora.values()]) - start
    expected = torch.cat([parameters[n].detach().flatten() for n in policy.lora]) - start
    assert (moved - expected).norm() < 0.01 * expected.norm()
    assert metrics["policy/clipped_frac"] > 0
    assert abs(metrics["policy/ratio_mean"] - 1) > 1e-4


def test_the_gradient_is_clipped_by_its_exact_norm(tiny_llama: Path, dist: Dist):
    config = settings(optim={"max_grad_norm": 0.01})
    clipped, metrics = gradients_after_step(policy_of(tiny_llama, config, dist), config, dist)
    assert metrics["optim/grad_norm"] > 0.01
    assert float(clipped.norm()) == pytest.approx(0.01, rel=1e-4)


def test_a_gradient_that_is_not_finite_stops_the_run_and_leaves_the_weights(tiny_llama: Path, dist: Dist):
    config = settings()
    policy = policy_of(tiny_llama, config, dist)
    samples = random_samples(0)
    samples[0] = replace(samples[0], rollout_logprobs=[float("nan")] * len(samples[0].rollout_logprobs))
    before = copy.deepcopy(adapter_tensors(policy))
    with pytest.raises(TrainingDiverged, match="policy in step 7 is not finite"):
        train_rows(policy, optimizer_of(policy, config), samples, 7, config, dist)
    assert all(torch.equal(before[n], t) for n, t in adapter_tensors(policy).items())


def test_dropout_is_a_function_of_seed_and_step(tiny_llama: Path, dist: Dist):
    def gradient(seed: int, step: int) -> torch.Tensor:
        policy = policy_of(tiny_llama, settings(lora={"dropout": 0.3}), dist)
        torch.manual_seed(time.monotonic_ns() % 1000)  # whatever ran before must not matter
        config = settings(lora={"dropout": 0.3}, seed=seed)
        optimizer = optimizer_of(policy, config)
        train_rows(policy, optimizer, random_samples(0), step, config, dist)
        return optimizer.grads.clone()

    assert torch.equal(gradient(0, 1), gradient(0, 1))
    assert not torch.allclose(gradient(0, 1), gradient(0, 2))
    assert not torch.allclose(gradient(0, 1), gradient(1, 1))


def test_module_choice(tiny_llama: Path, dist: Dist):
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


def test_a_folder_that_is_no_model_is_refused_in_one_sentence(tmp_path: Path, tiny_llama: Path, dist: Dist):
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_policy(resolved(tmp_path, tmp_path), settings(), dist)
    make_tiny_model(tmp_path / "torn")
    weights = tmp_path / "torn" / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:5000])
    with pytest.raises(ModelError, match="torn"):
        load_policy(resolved(tmp_path / "torn", tmp_path), settings(), dist)


def test_a_model_without_some_of_its_weights_is_refused(tmp_path: Path, dist: Dist):
    weights = make_tiny_model(tmp_path / "model") / "model.safetensors"
    tensors = load_file(weights)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    save_file(tensors, weights, metadata={"format": "pt"})
    with pytest.raises(ModelError, match="lacks 1 weights"):
        load_policy(resolved(tmp_path / "model", tmp_path), settings(), dist)


@pytest.mark.parametrize(
    ("algorithm", "tokens", "looks"),
    [
        ({}, 4096, []),
        ({}, 60, []),
        ({"kl_coef": 0.05}, 60, ["base"]),
        ({"kl_coef": 0.05, "kl_in": "reward"}, 60, ["policy", "base"]),
        ({"updates_per_step": 2}, 4096, ["policy"]),
    ],
)
def test_the_model_runs_once_a_micro_batch_and_again_only_for_what_the_algorithm_must_know_before(
    algorithm: dict[str, Any], tokens: int, looks: list[str], tiny_llama: Path, dist: Dist
):
    """`looks`: the passes besides, which keep no graph: of the policy (old logprobs) or of the base under it (a KL's reference)."""
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
    assert sorted(passes) == sorted([("policy", True), *((kind, False) for kind in looks)] * training)
