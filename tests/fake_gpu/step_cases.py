"""train_step itself on fake CUDA tensors, from a step's groups to its metrics. test_fake_gpu.py runs it.

What needs real values is stubbed: the plan of the batch and the advantages, which are made on the host; the
norm of the gradient; and the sums that become metrics. A step waits for the norm once per update, and for the
sums once. PPO and REINFORCE++ compute their returns on the host, so they also wait for columns of tokens and
for the moments that whiten. Not here, because they fetch more: the selection of tokens by entropy or
covariance, and groups with the KL in their rewards.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from skylite.model.packing import upload
from skylite.run.rollout_file import examples_of
from skylite.trainer.anomaly import parameter_anomaly
from skylite.trainer.critic import make_critic
from skylite.trainer.micro_batches import arrange
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.precompute import credit
from skylite.trainer.step import train_step
from skylite.trainer.trainer import Trainer
from tests.fake_gpu.cases import model_config
from tests.fake_gpu.mode import GPU, NoCopies, fake_gpu
from tests.fake_gpu.policies import fake_policy, one_rank
from tests.rows import groups_of, random_samples
from tests.small_run import settings

NORM = 2.0


class Waits(list[str]):
    """What the step fetched from the device or sent to it from memory that is not pinned, in order."""


@contextmanager
def known_waits(mode: FakeTensorMode) -> Iterator[Waits]:
    """Give the plan, the advantages and what the step fetches real values, and list each wait."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skylite.trainer.step.arrange", with_values(arrange))
        patch.setattr("skylite.trainer.precompute.credit", with_values(credit))
        patch.setattr("skylite.trainer.precompute.upload", under(mode, upload))
        waits = Waits()
        stub_fetches(patch, waits)
        stub_uploads(patch, waits, mode)
        yield waits


def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with real tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with unset_fake_temporarily():
            return function(*args, **kwargs)

    return call


def under(mode: FakeTensorMode, function: Callable[..., Any]) -> Callable[..., Any]:
    """The function with fake tensors."""

    def call(*args: Any, **kwargs: Any) -> Any:
        with mode:
            return function(*args, **kwargs)

    return call


def stub_fetches(patch: pytest.MonkeyPatch, waits: Waits) -> None:
    """The norm is NORM, a number or an element 1, unless it was sent to the device before."""

    def norm(grads: Tensor, dtype: torch.dtype) -> float:
        assert grads.device == GPU
        waits.append("norm")
        return NORM

    def tolist(values: Tensor) -> Any:
        assert values.device == GPU
        waits.append("sums")
        return [1.0] * len(values) if values.dim() == 1 else [[1.0] * values.shape[1]] * len(values)

    def cpu(values: Tensor) -> Tensor:
        assert values.device == GPU
        waits.append("columns" if values.dim() == 2 else "moments")
        sent: Tensor | None = getattr(values, "sent", None)
        return torch.ones(values.shape) if sent is None else sent

    patch.setattr(torch.linalg, "vector_norm", norm)
    patch.setattr(FakeTensor, "tolist", tolist)
    patch.setattr(FakeTensor, "cpu", cpu)


def stub_uploads(patch: pytest.MonkeyPatch, waits: Waits, mode: FakeTensorMode) -> None:
    """A real tensor that is sent to the device becomes a fake one that remembers it."""

    def to(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if isinstance(x, FakeTensor) or args != (GPU,):
            return original(x, *args, **kwargs)
        waits.append("upload")
        with mode:
            fake = torch.empty(x.shape, dtype=x.dtype, device=GPU)
        fake.sent = x  # type: ignore[attr-defined]
        return fake

    original: Callable[..., Tensor] = Tensor.to
    patch.setattr(Tensor, "to", to)


def step_of(family: str, algorithm: dict[str, Any], checkpointing: str) -> tuple[Waits, dict[str, float]]:
    """Run a step on fake CUDA tensors. Returns what it waited for, and its metrics."""
    config = settings(
        algorithm=algorithm, trainer={"tokens_per_micro_batch": 40, "checkpointing": checkpointing}
    )
    examples = examples_of(groups_of(random_samples(0)))
    with fake_gpu() as mode:
        policy = fake_policy(model_config(family), config, "tree")
        optim = config.optim
        optimizer = make_optimizer("policy", policy.lora, optim.lr, optim.max_grad_norm, optim)
        critic = make_critic(policy, config, one_rank()) if config.algorithm.uses_critic else None
        with known_waits(mode) as waits, NoCopies():
            dist = one_rank()
            trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer, critic=critic)
            metrics = train_step(trainer, examples, 1)
    for one in [optimizer] if critic is None else [optimizer, critic.optimizer]:
        moments = [state["exp_avg"] for state in one.adamw.state.values()]
        assert len(moments) == len(one.params)
        assert {x.device for x in [one.grads, *moments]} == {GPU}
    return waits, metrics


@pytest.mark.parametrize(
    ("algorithm", "norms", "checkpointing"),
    [
        ({}, 1, "full"),
        ({"kl_coef": 0.1, "entropy_coef": 0.01}, 1, "selective"),
        ({"name": "gspo", "updates_per_step": 2}, 2, "selective"),
    ],
    ids=["grpo", "kl and entropy", "gspo, two updates"],
)
def test_a_step_waits_for_a_norm_per_update_and_once_for_its_metrics(
    algorithm: dict[str, Any], norms: int, checkpointing: str
) -> None:
    waits, metrics = step_of("llama", algorithm, checkpointing)
    assert waits == [*["norm"] * norms, "sums"]
    assert metrics["optim/grad_norm"] == NORM
    assert metrics["tokens/unique"] == 1.0, "from the stub of the sums"
    assert metrics["groups/zero_std_frac"] == 0.25, "from the groups"


@pytest.mark.parametrize("family", ["gemma3", "moe"])
def test_a_step_of_other_models_waits_for_no_more(family: str) -> None:
    waits, _ = step_of(family, {}, "selective")
    assert waits == ["norm", "sums"]


@pytest.mark.parametrize(
    ("algorithm", "norms"),
    [({"name": "ppo"}, 2), ({"name": "reinforce++", "kl_coef": 0.1, "kl_in": "reward"}, 1)],
    ids=["ppo", "reinforce++"],
)
def test_returns_wait_once_for_columns_and_once_for_their_moments(
    algorithm: dict[str, Any], norms: int
) -> None:
    """The columns of all micro-batches: KL, values and token weights. PPO has a norm for its critic too."""
    waits, metrics = step_of("llama", algorithm, "selective")
    assert waits == ["columns", "upload", "moments", "upload", *["norm"] * norms, "sums"]
    assert metrics.get("critic/grad_norm", NORM) == NORM


def test_the_check_of_all_parameters_waits_once() -> None:
    config = settings()
    with fake_gpu() as mode:
        policy = fake_policy(model_config("llama"), config, "tree")
        optimizer = make_optimizer("policy", policy.lora, 1e-4, 1.0, config.optim)
        with known_waits(mode) as waits, NoCopies():
            assert parameter_anomaly([optimizer]) == ""
    assert waits == ["sums"]
