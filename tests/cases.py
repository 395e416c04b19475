"""What the trainer's tests share: settings of every algorithm, a policy, one step, the plain reference.

The policy's B matrices are not zero, so that the adapter changes the output.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig, PeftModel
from transformers import AutoModelForCausalLM

from skylite.config.algorithm import DISTILLATIONS, PRESETS, SOURCES
from skylite.config.train import TrainConfig
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.packing import Packing
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist
from skylite.processes.hardware import Dtype
from skylite.run.rollout_file import examples_of
from skylite.trainer.critic import Critic
from skylite.trainer.micro_batches import Table, arrange
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer, make_algorithm
from tests.decisions import resolved
from tests.reference import reference_loss
from tests.rows import Row, groups_of, random_samples
from tests.tiny_models import make_tiny_model

PROBE = list(range(20, 40))

OTHERS = ("ppo", "clip_cov", "kl_cov", "dapo", "raft", "online_dpo", *SOURCES, *DISTILLATIONS)
"""Presets with settings of their own below, or in test_best_of_group.py and test_peers_supervised.py."""
ALGORITHMS: dict[str, dict[str, Any]] = {
    **{n: {"name": n} for n in PRESETS if n not in OTHERS},
    "opd": {"name": "opd", "reward_weight": 0.5, "distill_coef": 0.3},
    "dapo": {"name": "dapo", "zero_std_groups": "drop", "mask_truncated": True},
    "grpo paper": {"aggregation": "seq-mean-token-mean", "kl_coef": 0.1, "kl_estimator": "k1"},
    # The paper's 2 to 3 leave nothing of episodes that this policy did not sample.
    "vespo": {
        "name": "vespo",
        **{"vespo_k_pos": 0.2, "vespo_k_neg": 0.3, "vespo_lambda_pos": 0.3, "vespo_lambda_neg": 0.2},
    },
    "dual_clip": {"policy_loss": "dual_clip", "dual_clip": 1.5},
    "clip_cov": {"name": "clip_cov", "cov_frac": 1.0, "clip_cov_low": 0.05},
    "kl_cov": {"name": "kl_cov", "cov_frac": 0.2},
    "k2 in the reward": {"kl_in": "reward", "kl_coef": 0.2, "kl_estimator": "k2"},
    "reinforce++, discounted, k1 in the reward": {
        "name": "reinforce++",
        "gamma": 0.9,
        "kl_in": "reward",
        "kl_coef": 0.2,
        "kl_estimator": "k1",
    },
    "entropy bonus": {"entropy_coef": 0.05},
    "top entropy": {"top_entropy_quantile": 0.3, "mask_truncated": True},
    "drop": {"zero_std_groups": "drop"},
}
IMPORTANCE: dict[str, dict[str, Any]] = {
    "mask a token": {"mode": "mask", "cap": 2.0, "floor": 0.3},
    "truncate a completion": {"level": "sequence", "cap": 1.5},
    "none": {"mode": "none"},
    "reject": {"reject_kl": 0.6},
}


def policy_of(
    model: Path, config: TrainConfig, dist: Dist, packing: Packing | None = None, dtype: Dtype = "float32"
) -> Policy:
    """A policy whose B matrices are not zero, packed as `packing` says or as its model allows."""
    policy = load_policy(resolved(model, model, placement={"dtype": dtype}), config, dist)
    generator = torch.Generator().manual_seed(1)
    for name, param in policy.lora.items():
        if "lora_B" in name:
            param.data.normal_(std=0.05, generator=generator)
    policy, _ = enable_shortcuts(policy, PROBE)
    if packing == "padded":
        policy.model.get_base_model().set_attn_implementation("eager")
    return replace(policy, packing=packing or policy.packing)


def optimizer_of(policy: Policy, config: TrainConfig) -> FlatAdamW:
    optim = config.optim
    return make_optimizer("policy", policy.lora, optim.lr, optim.max_grad_norm, optim, optim.lora_plus_ratio)


def plain_model(model: Path, policy: Policy, config: TrainConfig) -> Any:
    """The same weights in a plain PEFT model: no shards, transformers' attention."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    plain = PeftModel(
        base,
        LoraConfig(
            task_type="CAUSAL_LM",
            r=4,
            lora_alpha=8,
            target_modules=policy.target_modules,
            target_parameters=policy.target_parameters or None,
        ),
    ).eval()
    for name, param in plain.named_parameters():
        if param.requires_grad:
            param.data.copy_(policy.lora[name].data)
    return plain


def train_rows(
    policy: Policy,
    optimizer: FlatAdamW,
    rows: Sequence[Row],
    step: int,
    config: TrainConfig,
    dist: Dist,
    critic: Critic | None = None,
) -> dict[str, float]:
    """Run `train_step` on rows."""
    trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer, critic=critic)
    return train_step(trainer, examples_of(groups_of(rows)), step)


def table_of(rows: Sequence[Row], config: TrainConfig) -> Table:
    """The step of these rows, as the trainer arranges it."""
    return arrange(examples_of(groups_of(rows)), make_algorithm(config), config)


def gradients_after_step(
    policy: Policy, config: TrainConfig, dist: Dist, rows: Sequence[Row] | None = None
) -> tuple[torch.Tensor, dict[str, float]]:
    """Gradient [P] of the step's last update and the step's metrics. The weights are restored."""
    before = {n: p.detach().clone() for n, p in policy.lora.items()}
    optimizer = optimizer_of(policy, config)
    metrics = train_rows(policy, optimizer, rows or random_samples(0), 1, config, dist)
    for name, param in policy.lora.items():
        param.data.copy_(before[name])
    return optimizer.grads.clone(), metrics


def reference_gradient(
    plain: Any, policy: Policy, config: TrainConfig, rows: Sequence[Row] | None = None
) -> torch.Tensor:
    """Gradient [P] of the first update, flat, in the order of the policy's parameters."""
    samples = rows or random_samples(0)
    reference_loss(plain, samples, range(len(samples)), config).backward()
    return flat_gradient(plain, policy)


def flat_gradient(plain: Any, policy: Policy) -> torch.Tensor:
    parameters = dict(plain.named_parameters())
    return torch.cat([parameters[n].grad.flatten() for n in policy.lora])


def model_with_norms(folder: Path, family: str) -> tuple[Any, str]:
    """A tiny model whose norms have random gains, and the form of the gain in RMS_NORM_GAINS."""
    model = AutoModelForCausalLM.from_pretrained(make_tiny_model(folder, family))
    torch.manual_seed(1)
    for name, param in model.named_parameters():
        if "norm" in name:
            torch.nn.init.normal_(param, std=0.3)
    return model, "1 + weight" if family.startswith("gemma") else "weight"


def assert_same_gradients(fused: Any, model: Any) -> None:
    """Two models give the weights of their projections the same gradients."""
    tokens = torch.tensor([PROBE])

    def grads(one: Any) -> list[torch.Tensor]:
        weights = [p for n, p in one.named_parameters() if n.endswith("proj.weight")]
        return [*torch.autograd.grad(one(tokens).logits.log_softmax(-1)[..., 3].sum(), weights)]

    for ours, theirs in zip(grads(fused), grads(model), strict=True):
        assert torch.allclose(ours, theirs, atol=1e-5 * float(theirs.abs().max()), rtol=1e-4)


def relative_difference(got: torch.Tensor, expected: torch.Tensor) -> float:
    assert expected.norm() > 1e-3
    return float((got - expected).norm() / expected.norm())
