"""Learning rates (LoRA+), checkpointed optimizer state and warm starts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from skylite.config.train import TrainConfig
from skylite.errors import ModelError, TrainingDiverged
from skylite.model.policy import REF, Policy, adapter_params, load_policy
from skylite.model.process_group import Dist
from skylite.run.run_dir import RunDir
from skylite.trainer.canary import canary_logprobs, check_reference
from skylite.trainer.checkpoint import load_checkpoint, save_checkpoint
from skylite.trainer.publish_adapter import adapter_tensors
from tests.cases import optimizer_of, policy_of, train_rows
from tests.decisions import resolved
from tests.rows import random_samples
from tests.small_run import settings

SEQUENCES = [list(range(20, 40)), list(range(60, 75))]


@pytest.fixture
def stage_one(tiny_llama: Path, tmp_path: Path, dist: Dist) -> Path:
    """A trained adapter: no matrix is zero."""
    policy = policy_of(tiny_llama, settings(), dist)
    save_file(adapter_tensors(policy), tmp_path / "adapter_model.safetensors")
    return tmp_path


def warm(model: Path, adapter: Path, config: TrainConfig, dist: Dist) -> Policy:
    return load_policy(resolved(model, model, identity={"warm_start": adapter}), config, dist)


def warm_settings(adapter: Path, **algorithm: Any) -> TrainConfig:
    return settings(lora={"from_adapter": str(adapter)}, algorithm=algorithm)


def test_lora_plus_gives_b_another_learning_rate(tiny_llama: Path, dist: Dist) -> None:
    config = settings(optim={"lr": 1e-3, "lora_plus_ratio": 8.0, "warmup_steps": 2})
    policy = policy_of(tiny_llama, config, dist)
    start = {n: p.detach().clone() for n, p in policy.lora.items()}
    metrics = train_rows(policy, optimizer_of(policy, config), random_samples(0), 1, config, dist)
    moved = {n: float((p.detach() - start[n]).abs().max()) for n, p in policy.lora.items()}
    # AdamW's first step moves a parameter by its rate for any gradient: half the rate in warmup step 1 of 2.
    assert all(
        m == pytest.approx(4e-3 if "lora_B" in n else 5e-4, rel=1e-3) for n, m in moved.items() if m > 0
    )
    assert {"lora_A", "lora_B"} == {n.split(".")[-3] for n, m in moved.items() if m > 0}
    assert metrics["optim/lr"] == pytest.approx(5e-4)


def test_a_checkpoint_restores_both_rates_of_lora_plus(tiny_llama: Path, tmp_path: Path, dist: Dist) -> None:
    config = settings(optim={"lr": 1e-3, "lora_plus_ratio": 8.0})
    policy = policy_of(tiny_llama, config, dist)
    optimizer, run = optimizer_of(policy, config), RunDir(tmp_path)
    run.checkpoints.mkdir()
    train_rows(policy, optimizer, random_samples(0), 1, config, dist)
    save_checkpoint(run, 1, config, [optimizer])
    train_rows(policy, optimizer, random_samples(1), 2, config, dist)
    again = policy_of(tiny_llama, config, dist)
    again_learner = optimizer_of(again, config)
    load_checkpoint(run.checkpoint_path(1), [again_learner])
    train_rows(again, again_learner, random_samples(1), 2, config, dist)
    assert all(torch.equal(p, again.lora[n]) for n, p in policy.lora.items())


def test_a_warm_start_equals_its_source_adapter(tiny_llama: Path, stage_one: Path, dist: Dist) -> None:
    trained = policy_of(tiny_llama, settings(), dist)
    again = warm(tiny_llama, stage_one, warm_settings(stage_one), dist)
    assert all(torch.equal(p, trained.lora[n]) for n, p in again.lora.items())
    assert REF not in again.model.peft_config  # without a KL there is no reference copy


@pytest.mark.parametrize(
    ("change", "sentence"),
    [
        ({"lora": {"rank": 8}}, r"shape \[4, 128\], but this run's model and rank need \[8, 128\]"),
        ({"lora": {"target_modules": ["q_proj"]}}, "has 24 tensors that this run would not train"),
        ({}, "lacks 2 of the 28 LoRA matrices"),
    ],
)
def test_an_adapter_that_does_not_fit_is_refused_with_a_reason(
    change: dict[str, Any], sentence: str, tiny_llama: Path, stage_one: Path, dist: Dist
) -> None:
    if not change:
        tensors = adapter_tensors(policy_of(tiny_llama, settings(), dist))
        save_file(
            {n: t for n, t in tensors.items() if "layers.1.mlp.up_proj" not in n},
            stage_one / "adapter_model.safetensors",
        )
    with pytest.raises(ModelError, match=sentence):
        warm(tiny_llama, stage_one, settings(**change), dist)


def test_the_kl_to_the_start_is_zero_and_grows_with_training(
    tiny_llama: Path, stage_one: Path, dist: Dist
) -> None:
    cold = load_policy(resolved(tiny_llama, tiny_llama), settings(algorithm={"kl_coef": 0.1}), dist)
    assert check_reference(cold, SEQUENCES, must_agree=True) == 0.0
    config = warm_settings(stage_one, kl_coef=0.1)
    policy = warm(tiny_llama, stage_one, config, dist)
    assert check_reference(policy, SEQUENCES, must_agree=True) == 0.0
    frozen = {n: p.detach().clone() for n, p in adapter_params(policy.model, REF).items()}
    metrics = [
        train_rows(policy, optimizer_of(policy, config), random_samples(s), s, config, dist) for s in (1, 2)
    ]
    assert metrics[0]["policy/kl_ref"] == 0.0
    assert metrics[1]["policy/kl_ref"] > 0.0
    assert all(torch.equal(p, frozen[n]) for n, p in adapter_params(policy.model, REF).items())


def test_a_warm_start_has_a_nonzero_kl_to_the_base(tiny_llama: Path, stage_one: Path, dist: Dist) -> None:
    policy = warm(tiny_llama, stage_one, warm_settings(stage_one, kl_coef=0.1, kl_ref="base"), dist)
    assert check_reference(policy, SEQUENCES, must_agree=False) > 0.0
    with pytest.raises(TrainingDiverged, match="must be 0"):
        check_reference(policy, SEQUENCES, must_agree=True)


def test_only_the_policy_is_published(tiny_llama: Path, stage_one: Path, dist: Dist) -> None:
    config = settings(
        lora={"from_adapter": str(stage_one)}, algorithm={"name": "ppo", "kl_coef": 0.1}, critic={"rank": 4}
    )
    policy = warm(tiny_llama, stage_one, config, dist)
    assert set(policy.model.peft_config) == {"default", "ref", "critic"}
    plain = policy_of(tiny_llama, settings(), dist)
    assert {n: t.shape for n, t in adapter_tensors(policy).items()} == {
        n: t.shape for n, t in adapter_tensors(plain).items()
    }
    assert canary_logprobs(policy, SEQUENCES) == canary_logprobs(
        warm(tiny_llama, stage_one, warm_settings(stage_one), dist), SEQUENCES
    )
