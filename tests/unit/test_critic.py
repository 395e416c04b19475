"""PPO's critic, which shares the policy's base: gradients against a plain model, memory, checkpoint."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from peft import LoraConfig, PeftModel
from torch.distributed.tensor import DTensor
from transformers import AutoModelForCausalLM

from skylite.algorithms.advantages import gae
from skylite.config.train import TrainConfig
from skylite.errors import TrainingDiverged
from skylite.model.fast_path_check import enable_shortcuts
from skylite.model.packing import PackedTokens, pack_tokens
from skylite.model.policy import Policy, load_policy
from skylite.model.process_group import Dist
from skylite.run.run_dir import RunDir
from skylite.trainer.anomaly import reject_step, train_or_roll_back
from skylite.trainer.checkpoint import load_checkpoint, save_checkpoint
from skylite.trainer.critic import Critic, make_critic, predict_values
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from tests.cases import train_rows
from tests.decisions import resolved
from tests.reference import reference_before, reference_loss
from tests.rows import completions_of, random_samples, write_samples
from tests.small_run import settings
from tests.tiny_models import FAMILIES, make_tiny_model

PROBE = list(range(20, 40))
SAMPLES = random_samples(0)


def ppo_settings(**algorithm: Any) -> TrainConfig:
    algorithm = {"name": "ppo", "gamma": 0.95, "gae_lambda": 0.9, **algorithm}
    critic = {"rank": 3, "alpha": 6, "lr": 1e-2, "max_grad_norm": 1e9, "clip": 0.05}
    return settings(algorithm=algorithm, critic=critic, trainer={"tokens_per_micro_batch": 60})


def parts(model: Path, config: TrainConfig, dist: Dist) -> tuple[Policy, FlatAdamW, Critic]:
    """Policy and critic whose B matrices and value head are not zero."""
    policy = load_policy(resolved(model, model), config, dist)
    critic = make_critic(policy, config, dist)
    generator = torch.Generator().manual_seed(1)
    for name, param in [*policy.lora.items(), *critic.optimizer.params.items()]:
        if "lora_B" in name or "value_head" in name:
            param.data.normal_(std=0.05, generator=generator)
    policy, _ = enable_shortcuts(policy, PROBE)
    return policy, make_optimizer("policy", policy.lora, 1e-3, 1e9, config.optim), critic


def plain(
    model: Path, adapter: dict[str, torch.nn.Parameter], name: str, rank: int, alpha: int, modules: list[str]
) -> Any:
    """A plain PEFT model with one of the adapters, named "default" here."""
    base = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32, attn_implementation="eager")
    found = PeftModel(
        base, LoraConfig(task_type="CAUSAL_LM", r=rank, lora_alpha=alpha, target_modules=modules)
    ).eval()
    for key, param in found.named_parameters():
        if param.requires_grad:
            param.data.copy_(adapter[key.replace(".default", f".{name}")].data)
    return found


def plain_values(model: Any, weight: torch.Tensor, bias: torch.Tensor, sample: Any) -> torch.Tensor:
    """Values [C] at the token before each completion token."""
    ids = sample.prompt_token_ids + sample.completion_token_ids
    hidden = model(input_ids=torch.tensor([ids]), output_hidden_states=True).hidden_states[-1][0]
    return (hidden @ weight + bias)[len(sample.prompt_token_ids) - 1 : -1]


@pytest.mark.parametrize(
    ("family", "targets"), [*((family, None) for family in FAMILIES), ("llama", ["v_proj", "down_proj"])]
)
def test_policy_and_critic_have_the_gradients_of_two_plain_models(
    family: str, targets: list[str] | None, tmp_path: Path, dist: Dist
) -> None:
    model = make_tiny_model(tmp_path / "model", family)
    config = ppo_settings()
    if targets is not None:
        lora = config.lora.model_copy(update={"target_modules": ["q_proj", "v_proj", "gate_proj"]})
        critic_config = config.critic.model_copy(update={"target_modules": targets})
        config = config.model_copy(update={"lora": lora, "critic": critic_config})
    policy, optimizer, critic = parts(model, config, dist)
    start = {n: p.detach().clone() for n, p in critic.optimizer.params.items()}
    own = plain(model, policy.lora, "default", 4, 8, policy.target_modules)
    value_model = plain(model, critic.optimizer.params, "critic", 3, 6, targets or policy.target_modules)
    metrics = train_rows(policy, optimizer, SAMPLES, 1, config, dist, critic)

    weight, bias = (start[f"value_head.{n}"].requires_grad_() for n in ("weight", "bias"))
    values = [plain_values(value_model, weight, bias, s) for s in SAMPLES]
    before = reference_before(own, SAMPLES, config, [v.detach() for v in values])
    reference_loss(own, SAMPLES, range(len(SAMPLES)), config, before).backward()
    num_tokens = sum(len(s.completion_token_ids) for s in SAMPLES)
    total = torch.zeros(())
    for sample, value in zip(SAMPLES, values, strict=True):
        rewards = torch.zeros(len(value))
        rewards[-1] = sample.reward
        returns = gae(rewards, value.detach(), 0.95, 0.9) + value.detach()
        total = (
            total + 0.5 * ((value - returns) ** 2).sum() / num_tokens
        )  # the old values equal the values: nothing is clipped yet
    total.backward()

    parameters = dict(own.named_parameters())
    expected = torch.cat([parameters[n].grad.flatten() for n in policy.lora])
    assert float((optimizer.grads - expected).norm() / expected.norm()) < 1e-5
    grads = dict(value_model.named_parameters())
    names = list(critic.optimizer.params)
    head = {"value_head.weight": weight, "value_head.bias": bias}
    parts_of = [head[n] if n in head else grads[n.replace(".critic", ".default")] for n in names]
    wanted = torch.cat([p.grad.flatten() for p in parts_of if p.grad is not None])
    assert float((critic.optimizer.grads - wanted).norm() / wanted.norm()) < 1e-5
    assert metrics["critic/loss"] == pytest.approx(float(total.detach()), rel=1e-4)
    assert metrics["critic/grad_norm"] == pytest.approx(float(wanted.norm()), rel=1e-4)


def test_critic_and_policy_do_not_change_each_other(tiny_llama: Path, dist: Dist) -> None:
    config = ppo_settings(updates_per_step=2)
    policy, optimizer, critic = parts(tiny_llama, config, dist)
    base = base_weights(policy)
    optimizer.grads.zero_()
    predict_values(policy, critic, _tokens(policy)).sum().backward()
    assert optimizer.grads.abs().max() == 0
    assert critic.optimizer.grads.abs().max() > 0
    before = {n: p.detach().clone() for n, p in [*policy.lora.items(), *critic.optimizer.params.items()]}
    train_rows(policy, optimizer, SAMPLES, 1, config, dist, critic)
    moved = {
        n
        for n, p in [*policy.lora.items(), *critic.optimizer.params.items()]
        if not torch.equal(p, before[n])
    }
    assert any(".default." in n for n in moved)
    assert any(".critic." in n for n in moved)
    assert "value_head.weight" in moved
    assert all(torch.equal(p, base[n]) for n, p in base_weights(policy).items())


def test_recomputed_layers_give_the_critic_its_own_gradient(tiny_llama: Path, dist: Dist) -> None:
    def gradient(checkpointing: str) -> torch.Tensor:
        config = ppo_settings()
        trainer = config.trainer.model_copy(update={"checkpointing": checkpointing})
        policy, _, critic = parts(tiny_llama, config.model_copy(update={"trainer": trainer}), dist)
        predict_values(policy, critic, _tokens(policy)).sum().backward()
        return critic.optimizer.grads

    kept, recomputed = gradient("none"), gradient("full")
    assert float((kept - recomputed).norm() / kept.norm()) < 1e-5


def test_a_critic_adds_an_adapter_not_a_model(tiny_llama: Path, dist: Dist) -> None:
    with_critic = load_policy(resolved(tiny_llama, tiny_llama), ppo_settings(), dist)
    critic = make_critic(with_critic, ppo_settings(), dist)
    without = load_policy(resolved(tiny_llama, tiny_llama), settings(), dist)
    count = lambda policy: sum(p.numel() for p in policy.model.parameters())  # noqa: E731
    assert (
        count(with_critic) + critic.head.weight.numel() + 1 - count(without) == critic.optimizer.grads.numel()
    )


def test_values_start_at_zero_and_learn_the_return(tiny_llama: Path, dist: Dist) -> None:
    """The reward depends only on the prompt: groups have equal rewards and every value is predictable."""
    config = settings(algorithm={"name": "ppo"}, critic={"lr": 1e-2, "clip": 10.0}, num_steps=40)
    samples = [replace(s, reward=float(s.group % 2)) for s in SAMPLES]
    policy = load_policy(resolved(tiny_llama, tiny_llama), config, dist)
    critic = make_critic(policy, config, dist)
    policy, _ = enable_shortcuts(policy, PROBE)
    optimizer = make_optimizer("policy", policy.lora, 1e-9, 1.0, config.optim)
    assert predict_values(policy, critic, _tokens(policy)).abs().max() == 0
    history = [train_rows(policy, optimizer, samples, step, config, dist, critic) for step in range(1, 41)]
    lengths = [len(s.completion_token_ids) for s in samples]
    first = sum(0.5 * s.reward * n for s, n in zip(samples, lengths, strict=True)) / sum(
        lengths
    )  # (0 - R)^2 / 2, R is 0 or 1
    assert history[0]["critic/loss"] == pytest.approx(first, rel=1e-5)
    assert history[-1]["critic/loss"] < 0.1 * first
    assert history[-1]["critic/explained_variance"] > 0.8
    assert "groups/zero_std_frac" not in history[0], "it says nothing of a signal here"


def test_a_checkpoint_restores_the_critic(tiny_llama: Path, tmp_path: Path, dist: Dist) -> None:
    config = ppo_settings()
    policy, optimizer, critic = parts(tiny_llama, config, dist)
    run = RunDir(tmp_path)
    run.checkpoints.mkdir()
    train_rows(policy, optimizer, SAMPLES, 1, config, dist, critic)
    save_checkpoint(run, 1, config, [optimizer, critic.optimizer])
    train_rows(policy, optimizer, SAMPLES, 2, config, dist, critic)
    again_policy, again_learner, again_critic = parts(tiny_llama, config, dist)
    assert load_checkpoint(run.checkpoint_path(1), [again_learner, again_critic.optimizer]) == 1
    train_rows(again_policy, again_learner, SAMPLES, 2, config, dist, again_critic)
    for name, param in [*policy.lora.items(), *critic.optimizer.params.items()]:
        again = {**again_policy.lora, **again_critic.optimizer.params}[name]
        assert torch.equal(param, again), name


def base_weights(policy: Policy) -> dict[str, torch.Tensor]:
    found = {n: p.detach() for n, p in policy.model.named_parameters() if ".lora_" not in n}
    return {n: (p.to_local() if isinstance(p, DTensor) else p).clone() for n, p in found.items()}


def _tokens(policy: Policy) -> PackedTokens:
    prompts, completions = [s.prompt_token_ids for s in SAMPLES], [s.completion_token_ids for s in SAMPLES]
    examples = completions_of(prompts, completions, [s.group for s in SAMPLES])
    return pack_tokens(examples, policy.packing, policy.device)


def test_a_bad_gradient_of_the_critic_advises_a_lower_critic_lr(
    tiny_llama: Path, tmp_path: Path, dist: Dist
) -> None:
    config, run = ppo_settings(), RunDir(tmp_path)
    critic = parts(tiny_llama, config, dist)[2].optimizer
    critic.grads[0] = float("nan")
    run.rollouts.mkdir()
    write_samples(run.rollout_path(3), SAMPLES)
    _, reason, hint = train_or_roll_back(
        [critic], dist, lambda: {"critic/grad_norm": critic.update(dist)}, lambda _: "", dict
    )
    with pytest.raises(TrainingDiverged) as caught:
        reject_step(run, config, dist, 3, reason, {}, lambda: None, hint)
    assert str(caught.value) == (
        "Step 3 went bad: the gradient of the critic is not finite (norm nan). The update was not applied; "
        f"the rollouts and the reason are in {run.rejected_steps}. Correct the reward if it returned no "
        "number. Resume with --set anomaly.action=skip to skip such steps, or start a new run from the last "
        "adapter (--from-adapter) with a lower critic.lr (now 0.01)."
    )
