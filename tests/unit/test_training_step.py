"""train_step on tiny models against the plain reference, for any order and split of the batch."""

from __future__ import annotations

import copy
import json
import random
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.errors import TrainingDiverged
from skylite.model.packing import Packing
from skylite.model.process_group import Dist
from skylite.trainer.publish_adapter import adapter_tensors
from tests.cases import (
    ALGORITHMS,
    IMPORTANCE,
    gradients_after_step,
    optimizer_of,
    plain_model,
    policy_of,
    reference_gradient,
    relative_difference,
    train_rows,
)
from tests.reference import reference_before, reference_logprobs, reference_loss
from tests.rows import random_samples
from tests.small_run import settings
from tests.tiny_models import FAMILIES, make_tiny_model


def sliding_window_model(folder: Path) -> Path:
    """A Mistral with a window of six tokens, which ends within prefix, prompt and completion."""
    make_tiny_model(folder, "mistral")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"sliding_window": 6}))
    return folder


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("family", [*FAMILIES, "mistral-window"])
def test_gradients_equal_the_reference(family: str, packing: Packing, tmp_path: Path, dist: Dist):
    folder = tmp_path / "model"
    model = sliding_window_model(folder) if family == "mistral-window" else make_tiny_model(folder, family)
    config = settings(rollout={"temperature": 0.8}, algorithm={"kl_coef": 0.05})
    policy = policy_of(model, config, dist, packing)
    got, metrics = gradients_after_step(policy, config, dist)
    expected = reference_gradient(plain_model(model, policy, config), policy, config)
    assert relative_difference(got, expected) < 1e-5
    assert metrics["optim/grad_norm"] == pytest.approx(float(expected.norm()), rel=1e-5)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_the_adapter_trains_in_float32_over_a_bfloat16_base(family: str, tmp_path: Path, dist: Dist):
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
    # bfloat16 has 8 bits: rounding costs a few percent over two layers, a wrong cast or scale far more.
    assert 1e-4 < relative_difference(optimizer.grads, expected) < 0.05


@pytest.mark.parametrize("budget", [4096, 40], ids=["one pass", "many passes"])
@pytest.mark.parametrize("name", ALGORITHMS)
def test_every_algorithm_has_the_gradient_of_the_reference(
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
def test_every_correction_has_the_gradient_of_the_reference(name: str, tiny_llama: Path, dist: Dist):
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


def test_metrics_equal_the_reference(tiny_llama: Path, dist: Dist):
    config = settings(algorithm={"kl_coef": 1e-9})  # a KL makes every group compute a gradient
    policy = policy_of(tiny_llama, config, dist)
    _, metrics = gradients_after_step(policy, config, dist)
    plain, samples = plain_model(tiny_llama, policy, config), random_samples(0)
    with torch.no_grad():
        gaps = torch.cat(
            [reference_logprobs(plain, s, 1.0) - torch.tensor(s.sampling_logprobs) for s in samples]
        ).abs()
    assert metrics["mismatch/logprob_diff_mean"] == pytest.approx(float(gaps.mean()), rel=1e-4)
    assert metrics["mismatch/logprob_diff_max"] == pytest.approx(float(gaps.max()), rel=1e-4)
    assert metrics["policy/ratio_mean"] == pytest.approx(1.0)
    assert metrics["groups/zero_std_frac"] == pytest.approx(0.25)
    assert metrics["tokens/completion"] == sum(len(s.completion_token_ids) for s in samples)
    alone = settings(algorithm={"name": "remax"}, rollout={"group_size": 1})
    _, metrics = gradients_after_step(policy, alone, dist, random_samples(0, group_size=1))
    assert "groups/zero_std_frac" not in metrics


@pytest.mark.parametrize(
    "algorithm", [{}, {"updates_per_step": 2}, {"name": "dr_grpo"}, {"name": "reinforce++"}, {"name": "gspo"}]
)
def test_the_update_does_not_depend_on_the_micro_batches(
    tiny_llama: Path, dist: Dist, algorithm: dict[str, Any]
):
    gradients = []
    for budget in (4096, 60, 16):
        config = settings(algorithm=algorithm, trainer={"tokens_per_micro_batch": budget})
        gradients.append(gradients_after_step(policy_of(tiny_llama, config, dist), config, dist)[0])
    for other in gradients[1:]:
        assert relative_difference(other, gradients[0]) < 1e-5


def test_zero_std_groups_are_skipped_without_changing_the_update(tiny_llama: Path, dist: Dist):
    skipping, complete = settings(), settings(algorithm={"kl_coef": 1e-12})
    a, metrics_a = gradients_after_step(policy_of(tiny_llama, skipping, dist), skipping, dist)
    b, metrics_b = gradients_after_step(policy_of(tiny_llama, complete, dist), complete, dist)
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


def test_a_non_finite_gradient_stops_the_run_and_keeps_the_weights(tiny_llama: Path, dist: Dist):
    config = settings()
    policy = policy_of(tiny_llama, config, dist)
    samples = random_samples(0)
    samples[0] = replace(samples[0], sampling_logprobs=[float("nan")] * len(samples[0].sampling_logprobs))
    before = copy.deepcopy(adapter_tensors(policy))
    with pytest.raises(TrainingDiverged, match=r"gradient of the policy is not finite \(norm nan\)"):
        train_rows(policy, optimizer_of(policy, config), samples, 7, config, dist)
    assert all(torch.equal(before[n], t) for n, t in adapter_tensors(policy).items())


@pytest.mark.parametrize("position", ["before", "after"])
def test_dropout_depends_only_on_seed_and_step(position: str, tiny_llama: Path, dist: Dist):
    lora = {"dropout": 0.3, "dropout_position": position}

    def gradient(seed: int, step: int) -> torch.Tensor:
        policy = policy_of(tiny_llama, settings(lora=lora), dist)
        torch.manual_seed(time.monotonic_ns() % 1000)  # earlier random numbers must not matter
        config = settings(lora=lora, seed=seed)
        optimizer = optimizer_of(policy, config)
        train_rows(policy, optimizer, random_samples(0), step, config, dist)
        return optimizer.grads.clone()

    assert torch.equal(gradient(0, 1), gradient(0, 1))
    assert not torch.allclose(gradient(0, 1), gradient(0, 2))
    assert not torch.allclose(gradient(0, 1), gradient(1, 1))
