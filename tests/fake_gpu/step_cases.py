"""train_step itself on fake CUDA tensors, from a step's groups to its metrics. test_fake_gpu.py runs it.

Three things of a step need real values, and are stubbed: the plan of the batch, which is made on the host;
the norm of the gradient; and the sums that become metrics. The last two are all that a step waits for: once
per update, and twice in total. Not here, because they fetch a column more: the selection of tokens by entropy
or covariance, and the returns of PPO and REINFORCE++.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode, unset_fake_temporarily

from skylite.model.packing import upload as packing_upload
from skylite.trainer import micro_batches
from skylite.trainer.assign_advantages import assign_advantages
from skylite.trainer.micro_batch_plan import arrange
from skylite.trainer.optimizer import make_optimizer
from skylite.trainer.step import train_step
from tests.fake_gpu.cases import model_config
from tests.fake_gpu.mode import GPU, NoCopies, fake_gpu
from tests.fake_gpu.policies import fake_policy, one_rank
from tests.rows import groups_of, random_samples
from tests.small_run import settings

NORM = 2.0


class Fetched(list[str]):
    """What the step fetched from the device, in order."""


@contextmanager
def known_fetches(mode: FakeTensorMode) -> Iterator[Fetched]:
    """Give the plan real values, and list each fetch of the norm ("norm") and of sums ("sums")."""
    fetched = Fetched()

    def with_values(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            with unset_fake_temporarily():
                return function(*args, **kwargs)

        return call

    def upload(*args: Any) -> list[Tensor]:
        with mode:
            return micro_upload(*args)

    def norm(grads: Tensor, dtype: torch.dtype) -> float:
        assert grads.device == GPU
        fetched.append("norm")
        return NORM

    def tolist(values: Tensor) -> Any:
        assert values.device == GPU
        fetched.append("sums")
        return [1.0] * len(values) if values.dim() == 1 else [[1.0] * values.shape[1]] * len(values)

    micro_upload = packing_upload
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("skylite.trainer.step.arrange", with_values(arrange))
        patch.setattr(micro_batches, "_needed", with_values(micro_batches._needed))
        patch.setattr("skylite.trainer.step.assign_advantages", with_values(assign_advantages))
        patch.setattr("skylite.trainer.assign_advantages.upload", upload)
        patch.setattr(torch.linalg, "vector_norm", norm)
        patch.setattr(FakeTensor, "tolist", tolist)
        yield fetched


@pytest.mark.parametrize("checkpointing", ["selective", "full"])
@pytest.mark.parametrize(
    ("algorithm", "norms"),
    [({}, 1), ({"kl_coef": 0.1, "entropy_coef": 0.01}, 1), ({"name": "gspo", "updates_per_step": 2}, 2)],
    ids=["grpo", "kl and entropy", "gspo, two updates"],
)
def test_a_step_fetches_a_norm_per_update_and_its_metrics_twice(
    algorithm: dict[str, Any], norms: int, checkpointing: str
) -> None:
    config = settings(
        algorithm=algorithm, trainer={"tokens_per_micro_batch": 40, "checkpointing": checkpointing}
    )
    groups = groups_of(random_samples(0))
    with fake_gpu() as mode:
        policy = fake_policy(model_config("llama"), config, "tree")
        optim = config.optim
        optimizer = make_optimizer("policy", policy.lora, optim.lr, optim.max_grad_norm, optim)
        with known_fetches(mode) as fetched, NoCopies():
            metrics = train_step(policy, optimizer, groups, 1, config, one_rank())
    assert fetched == ["norm"] * norms + ["sums"] * 2
    assert metrics["optim/grad_norm"] == NORM
    assert metrics["tokens/unique"] == 1.0, "from the stub of the sums"
    assert metrics["groups/zero_std_frac"] == 0.25, "from the groups"
    moments = [state["exp_avg"] for state in optimizer.adamw.state.values()]
    assert len(moments) == len(policy.lora)
    assert {x.device for x in [optimizer.grads, *moments]} == {GPU}
