"""precompute, forward_backward and optim_step of a step, with numbers computed by hand.

A model of one parameter takes the network's place: the logprob of token i is theta * x[i].
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from skylite.algorithms.losses import BatchSize
from skylite.config.train import OptimConfig
from skylite.errors import TrainingDiverged
from skylite.model.packing import PackedTokens
from skylite.model.policy import POLICY, REF
from skylite.model.process_group import Dist
from skylite.trainer import precompute as precompute_module
from skylite.trainer import trainer as trainer_module
from skylite.trainer.metrics import MetricSums
from skylite.trainer.micro_batches import MicroBatch
from skylite.trainer.optimizer import FlatAdamW, make_optimizer
from skylite.trainer.trainer import Trainer
from tests.small_run import settings


def optimizer_of(values: list[float], **optim: Any) -> FlatAdamW:
    config = OptimConfig.model_validate({"beta1": 0.9, "beta2": 0.99, "weight_decay": 0.0} | optim)
    params = {"theta": nn.Parameter(torch.tensor(values))}
    return make_optimizer("policy", params, config.lr, config.max_grad_norm, config)


def trainer_of(optimizer: Any, dist: Any = None, policy: Any = None, **sections: Any) -> Trainer:
    return Trainer(config=settings(**sections), dist=dist, policy=policy, optimizer=optimizer)


def micro_batch(x: list[float], weights: list[float]) -> MicroBatch:
    """Tokens of one trajectory. Its inputs are the x of the one-parameter model."""
    count = torch.arange(len(x))
    tokens = PackedTokens(
        inputs={"x": torch.tensor(x)},
        rows=count,
        targets=count,
        segments=torch.zeros_like(count),
        num_segments=1,
        num_nodes=len(x),
        tokens_before=np.arange(len(x) + 1),
    )
    return MicroBatch(
        examples=[],
        numbers=[0],
        tokens=tokens,
        keys=count,
        token_weights=torch.tensor(weights),
        size=BatchSize(3, 1, 3),
        sampling_logprobs=-torch.tensor(x),
    )


def test_optim_step_clips_the_gradient_and_moves_by_the_learning_rate(dist: Dist) -> None:
    """The norm of (3, 4) is 5. AdamW's first move is lr * g / |g|, whatever the size of the gradient."""
    optimizer = optimizer_of([1.0, 1.0], lr=0.1, max_grad_norm=1.0)
    optimizer.grads.copy_(torch.tensor([3.0, -4.0]))
    assert trainer_of(optimizer, dist).optim_step("policy") == 5.0
    torch.testing.assert_close(optimizer.grads, torch.tensor([0.6, -0.8]))
    torch.testing.assert_close(optimizer.params["theta"].data, torch.tensor([0.9, 1.1]))
    moments = optimizer.adamw.state[optimizer.params["theta"]]
    torch.testing.assert_close(moments["exp_avg"], torch.tensor([0.06, -0.08]))
    torch.testing.assert_close(moments["exp_avg_sq"], torch.tensor([0.0036, 0.0064]))


def test_optim_step_refuses_a_gradient_that_is_not_finite(dist: Dist) -> None:
    optimizer = optimizer_of([1.0, 1.0], lr=0.1, max_grad_norm=1.0)
    optimizer.grads.copy_(torch.tensor([3.0, math.inf]))
    with pytest.raises(TrainingDiverged, match=r"gradient of the policy is not finite \(norm inf\)"):
        trainer_of(optimizer, dist).optim_step("policy")
    assert optimizer.params["theta"].tolist() == [1.0, 1.0]


@pytest.fixture
def scores(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Old logprobs (-1, -2), and (-1.5, -1) under the reference. Lists the passes."""
    passes: list[str] = []

    @contextmanager
    def frozen_policy(_: Any, name: str) -> Iterator[None]:
        assert name == REF
        passes.append("ref:")
        yield
        passes.append(":ref")

    def score(*_: Any) -> tuple[Tensor, Tensor]:
        passes.append("pass")
        in_ref = passes[-2:-1] == ["ref:"]
        return torch.tensor([-1.5, -1.0] if in_ref else [-1.0, -2.0]), torch.tensor([0.7, 0.8])

    monkeypatch.setattr(precompute_module, "frozen_policy", frozen_policy)
    monkeypatch.setattr(precompute_module, "score", score)
    return passes


def precomputed(**sections: Any) -> MicroBatch:
    return trainer_of(None, **sections).forward(micro_batch([1.0, 2.0], [1.0, 1.0]))


def test_precompute_runs_no_pass_for_one_plain_update(scores: list[str]) -> None:
    found = precomputed()
    assert (found.old_logprobs, found.entropies, found.kl_penalty, found.values) == (None,) * 4
    assert scores == []


def test_precompute_gives_old_logprobs_for_two_updates(scores: list[str]) -> None:
    found = precomputed(algorithm={"updates_per_step": 2})
    assert scores == ["pass"]
    assert found.old_logprobs is not None
    assert found.entropies is not None
    assert found.old_logprobs.tolist() == [-1.0, -2.0]
    assert found.entropies.tolist() == pytest.approx([0.7, 0.8])
    assert (found.kl_penalty, found.values) == (None, None)


def test_precompute_gives_the_kl_that_is_taken_from_the_reward(scores: list[str]) -> None:
    """k1 is policy - ref: 0.1 * (-1 + 1.5) and 0.1 * (-2 + 1)."""
    found = precomputed(algorithm={"kl_coef": 0.1, "kl_in": "reward", "kl_estimator": "k1"})
    assert scores == ["pass", "ref:", "pass", ":ref"]
    assert found.kl_penalty is not None
    assert found.kl_penalty.tolist() == pytest.approx([0.05, -0.1])


def test_forward_backward_sums_the_gradients_of_all_micro_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Before the first move every ratio is 1, so the gradient is -sum(weight * advantage * x)."""
    optimizer = optimizer_of([-1.0], lr=0.1)
    theta = optimizer.params["theta"]
    lora = {POLICY: SimpleNamespace(lora_dropout=0.0)}
    policy: Any = SimpleNamespace(model=SimpleNamespace(peft_config=lora), adapter=POLICY)

    def score(_: Any, tokens: PackedTokens, temperature: float) -> tuple[Tensor, Tensor]:
        x = tokens.inputs["x"]
        return theta * x, torch.full_like(x, 0.5)

    monkeypatch.setattr(trainer_module, "score", score)
    micro_batches = [micro_batch([1.0, 2.0], [0.5, 0.25]), micro_batch([3.0], [0.25])]
    advantages = [torch.tensor([2.0, -1.0]), torch.tensor([4.0])]
    micro_batches = [replace(m, advantages=a) for m, a in zip(micro_batches, advantages, strict=True)]
    optimizer.grads.fill_(100.0)  # of an earlier update
    sums = MetricSums()
    trainer_of(optimizer, policy=policy).forward_backward("policy", micro_batches, sums)
    # -(0.5 * 2 * 1 + 0.25 * -1 * 2 + 0.25 * 4 * 3)
    assert optimizer.grads.tolist() == pytest.approx([-3.5])
    # -(0.5 * 2 + 0.25 * -1 + 0.25 * 4)
    assert float(sums.sums["loss/policy"]) == pytest.approx(-1.75)
    assert float(sums.sums["policy/entropy"]) == pytest.approx(1.5)
    assert float(sums.sums["mismatch/logprob_diff_mean"]) == 0.0, "the engine's logprobs are the same"
    assert (sums.num_tokens, sums.num_nodes) == (3, 3)
