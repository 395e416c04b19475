"""The divergence of a policy from its teacher over the vocabulary: by hand, against TRL, in a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from skylite.algorithms.distillation import OnPolicyDistillation
from skylite.algorithms.divergences import jensen_shannon
from skylite.algorithms.losses import BatchSize, LossInputs
from skylite.config.algorithm import AlgorithmConfig, ImportanceConfig
from skylite.model import chunked_divergence
from skylite.model.chunked_divergence import Head, TeacherStates
from skylite.model.process_group import Dist
from skylite.run.rollout_file import examples_of
from skylite.trainer.step import train_step
from skylite.trainer.trainer import make_trainer
from tests.cases import flat_gradient, plain_model, policy_of, relative_difference
from tests.rows import Row, groups_of, random_samples
from tests.small_run import settings
from tests.unit.peer_code import load_trl_gkd

BETAS = [0.0, 0.1, 0.5, 0.9, 1.0]


@pytest.fixture(scope="module")
def trl_loss() -> Callable[..., Tensor]:
    return load_trl_gkd()


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, 0.75 * math.log(1.5) + 0.25 * math.log(0.5)),
        (1.0, 0.5 * math.log(2 / 3) + 0.5 * math.log(2)),
        # m = (5/8, 3/8)
        (0.5, 0.5 * (0.75 * math.log(6 / 5) + 0.25 * math.log(2 / 3) + 0.5 * math.log(0.8 * 4 / 3))),
        # m = (9/16, 7/16)
        (0.25, 0.25 * (0.75 * math.log(4 / 3) + 0.25 * math.log(4 / 7)) + 0.75 * 0.5 * math.log(64 / 63)),
    ],
)
def test_divergences_of_two_coins(beta: float, expected: float) -> None:
    policy, teacher = torch.tensor([[0.5, 0.5]]), torch.tensor([[0.75, 0.25]])
    assert jensen_shannon(policy.log(), teacher.log(), beta).tolist() == pytest.approx([expected], rel=1e-6)
    assert jensen_shannon(policy.log(), policy.log(), beta).tolist() == pytest.approx([0.0], abs=1e-7)


def tokens_of(targets: Tensor) -> Any:
    """Each predicted by the row of its own number."""
    return SimpleNamespace(rows=torch.arange(len(targets)), targets=targets)


@pytest.mark.parametrize(("temperature", "softcap"), [(1.0, None), (0.7, 2.0)])
@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("elements", [1 << 20, 60], ids=["one chunk", "many chunks"])
def test_values_and_gradients_are_those_of_trl(
    beta: float,
    temperature: float,
    softcap: float | None,
    elements: int,
    trl_loss: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(chunked_divergence.CHUNK_ELEMENTS, "cpu", elements)
    torch.manual_seed(0)
    hidden, teacher = torch.randn(2, 11, 8)
    weight, bias, targets = torch.randn(23, 8), torch.randn(23), torch.randint(23, (11,))
    leaf, peer = (hidden.clone().requires_grad_() for _ in range(2))
    of_loss = torch.rand(11)
    values, logprobs = TeacherStates(teacher, None, partial(jensen_shannon, beta=beta)).compare(
        leaf, tokens_of(targets), Head(weight, bias, softcap), temperature
    )
    (values * of_loss).sum().backward()
    own, logits = (torch.nn.functional.linear(x, weight, bias) for x in (peer, teacher))
    if softcap is not None:
        own, logits = (softcap * torch.tanh(x / softcap) for x in (own, logits))
    expected = trl_loss(own[None], logits[None], None, beta, temperature, "none")[0].sum(-1)
    (expected * of_loss).sum().backward()
    assert torch.allclose(values, expected, rtol=1e-6, atol=1e-6)
    assert relative_difference(leaf.grad, peer.grad) < 1e-6
    chosen = torch.log_softmax(logits / temperature, -1).gather(1, targets[:, None])[:, 0]
    assert torch.allclose(logprobs, chosen, atol=1e-6)
    assert not logprobs.requires_grad


class Largest(TorchDispatchMode):
    """The elements of the largest tensor that an operation made."""

    def __init__(self) -> None:
        super().__init__()
        self.elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        found = result if isinstance(result, tuple | list) else [result]
        self.elements = max([self.elements, *(x.numel() for x in found if isinstance(x, Tensor))])
        return result


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_divergence.CHUNK_ELEMENTS, "cpu", 4000)
    hidden, weight = torch.randn(60, 4, requires_grad=True), torch.randn(1000, 4)
    with Largest() as seen:
        values, _ = TeacherStates(torch.randn(60, 4), None, partial(jensen_shannon, beta=0.5)).compare(
            hidden, tokens_of(torch.zeros(60).long()), Head(weight), 1.0
        )
        values.sum().backward()
    assert seen.elements == 4000


# A training step


def logits_of(model: Any, row: Row, before: Sequence[int], temperature: float) -> Tensor:
    """[C, V] before each completion token, after another prompt."""
    ids, first = [*before, *row.completion_token_ids], len(before)
    return model(torch.tensor([ids])).logits[0, first - 1 : -1].float() / temperature


@contextmanager
def base_of(plain: Any) -> Iterator[None]:
    with torch.no_grad(), plain.disable_adapter():
        yield


@pytest.mark.parametrize(
    ("budget", "has_head"),
    [(4096, True), (60, True), (60, False)],
    ids=["one pass", "many passes", "logits"],
)
def test_a_step_has_the_gradient_of_trls_loss(
    budget: int, has_head: bool, trl_loss: Any, tiny_llama: Path, dist: Dist
) -> None:
    """The base teaches a policy that has moved."""
    config = settings(
        # The plan, which would copy a folder, is not part of this.
        algorithm={"name": "gkd", "teacher": "x", "teacher_beta": 0.3, "distill_coef": 2.0},
        rollout={"temperature": 0.8},
        trainer={"tokens_per_micro_batch": budget},
    )
    rows = random_samples(0)
    policy = policy_of(tiny_llama, config, dist)
    assert policy.lm_head is not None
    if not has_head:
        policy = replace(policy, lm_head=None)
    plain = plain_model(tiny_llama, policy, config)
    metrics = train_step(make := make_trainer(policy, config, dist), examples_of(groups_of(rows)), 1)
    total, own = torch.zeros(()), list[Tensor]()
    for row in rows:
        with base_of(plain):
            teacher = logits_of(plain, row, row.prompt_token_ids, 0.8)
        logits = logits_of(plain, row, row.prompt_token_ids, 0.8)
        total = total + trl_loss(logits[None], teacher[None], None, 0.3, 1.0, "sum")
        chosen = torch.tensor(row.completion_token_ids)[:, None]
        both = (torch.log_softmax(x.detach(), -1).gather(1, chosen) for x in (logits, teacher))
        own.append(next(both) - next(both))
    count = sum(len(row.completion_token_ids) for row in rows)
    (2.0 * total / count).backward()
    assert relative_difference(make.optimizer.grads, flat_gradient(plain, policy)) < 1e-5
    assert metrics["teacher/divergence"] == pytest.approx(total.item() / count, rel=1e-5)
    assert metrics["loss/policy"] == pytest.approx(2 * total.item() / count, rel=1e-5)
    assert metrics["teacher/kl"] == pytest.approx(float(torch.cat(own).mean()), rel=1e-4)
    assert metrics["time/teacher_s"] > 0


@pytest.mark.parametrize("budget", [4096, 60], ids=["one pass", "many passes"])
def test_a_teacher_with_its_own_prompt_is_compared_at_the_tokens_that_it_teaches(
    budget: int, trl_loss: Any, tiny_llama: Path, dist: Dist
) -> None:
    algorithm = {"name": "sdpo", "teacher": "base", "teacher_beta": 1.0}
    config = settings(algorithm=algorithm, trainer={"tokens_per_micro_batch": budget})
    rows, prompt = random_samples(0), [7, 8, 9, 10]
    groups = [
        replace(
            group,
            trajectories=tuple(
                replace(t, calls=(replace(t.calls[0], teacher_prompt_token_ids=prompt if i % 2 else []),))
                for i, t in enumerate(group.trajectories)
            ),
        )
        for group in groups_of(rows)
    ]
    policy = policy_of(tiny_llama, config, dist)
    plain, trainer = plain_model(tiny_llama, policy, config), make_trainer(policy, config, dist)
    metrics = train_step(trainer, examples_of(groups), 1)
    taught, total = [row for i, row in enumerate(rows) if i % 2], torch.zeros(())
    for row in taught:
        with base_of(plain):
            teacher = logits_of(plain, row, prompt, 1.0)
        logits = logits_of(plain, row, row.prompt_token_ids, 1.0)
        total = total + trl_loss(logits[None], teacher[None], None, 1.0, 1.0, "sum")
    count = sum(len(row.completion_token_ids) for row in taught)
    (total / count).backward()
    assert relative_difference(trainer.optimizer.grads, flat_gradient(plain, policy)) < 1e-5
    assert metrics["teacher/divergence"] == pytest.approx(total.item() / count, rel=1e-5)


def test_bfloat16_has_nearly_the_gradient_of_float32(tiny_llama: Path, dist: Dist) -> None:
    config = settings(algorithm={"name": "gkd", "teacher": "x"})
    grads = []
    for dtype in ("float32", "bfloat16"):
        trainer = make_trainer(policy_of(tiny_llama, config, dist, dtype=dtype), config, dist)
        train_step(trainer, examples_of(groups_of(random_samples(0, num_groups=1))), 1)
        grads.append(trainer.optimizer.grads)
    assert relative_difference(grads[1], grads[0]) < 0.05


def test_reward_and_divergence_are_added_and_an_untaught_token_has_the_reward_alone() -> None:
    """Four tokens of weight 1/4, the second without a teacher; the slope of -ratio A is -A."""
    logprobs = torch.full((4,), -1.0, requires_grad=True)
    divergences = torch.tensor([0.5, 0.0, 1.0, 2.0], requires_grad=True)
    x = LossInputs(
        policy_logprobs=logprobs, old_logprobs=logprobs.detach(), advantages=torch.tensor([1.0, 1, -1, -1]),
        segments=torch.tensor([0, 0, 1, 1]), num_segments=2, sampling_logprobs=logprobs.detach(),
        teacher_logprobs=torch.tensor([-2.0, math.nan, -1.0, -1.0]), divergences=divergences,
        entropies=torch.zeros(4), token_weights=torch.full((4,), 0.25), weights=torch.full((4,), 0.25),
        size=BatchSize(4, 2, 8),
    )  # fmt: skip
    config = AlgorithmConfig(name="gkd", reward_weight=0.5, distill_coef=3.0)
    loss, sums = OnPolicyDistillation(config, ImportanceConfig()).loss(x)
    slopes, by_divergence = torch.autograd.grad(loss, (logprobs, divergences))
    assert slopes.tolist() == pytest.approx([-0.125, -0.125, 0.125, 0.125])
    assert by_divergence.tolist() == pytest.approx([0.75] * 4)
    assert loss.item() == pytest.approx(3 * 3.5 / 4)
    assert sums["teacher/divergence"].item() == 3.5
    assert sums["teacher/kl"].item() == pytest.approx(1.0)
    assert sums["teacher/taught_frac"].item() == 3


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"teacher_beta": 0.5}, "teacher_beta=0.5 has no effect with algorithm.name=grpo"),
        ({"name": "gkd"}, "teacher=base starts as the policy itself"),
        ({"name": "gkd", "teacher": "x", "teacher_beta": 1.5}, "less than or equal to 1"),
    ],
)
def test_settings_without_a_sense_are_refused(algorithm: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(algorithm=algorithm)
    assert settings(algorithm={"name": "gkd", "teacher": "x"}).algorithm.teacher_beta == 0.5
