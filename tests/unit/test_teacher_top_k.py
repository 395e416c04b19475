"""The divergence from the best tokens that a teacher's server gives: by hand, against TRL, in a step."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor

from skylite.algorithms.divergences import jensen_shannon, top_and_rest
from skylite.errors import ConfigError, DataError
from skylite.model import chunked_divergence
from skylite.model.chunked_divergence import Head, TeacherTop
from skylite.rollout.disk_check import rollout_bytes
from skylite.run.rollout_file import read_examples, read_rollouts, write_rollouts
from skylite.trainer.step import train_step
from skylite.trainer.trainer import make_trainer
from skylite.types import TEACHER_TOP_IDS, TEACHER_TOP_LOGPROBS, Call, Group
from tests.cases import flat_gradient, plain_model, policy_of, relative_difference
from tests.fakes.teacher_server import teacher_server
from tests.rows import groups_of, random_samples
from tests.small_run import settings
from tests.tiny_models import tiny_tokenizer
from tests.unit.peer_code import load_trl_server_distillation
from tests.unit.test_gkd import BETAS, Largest, base_of, logits_of, tokens_of
from tests.unit.test_teacher_server import check, config_of, flat, taught, with_prompts


@pytest.fixture(scope="module")
def trl() -> ModuleType:
    return load_trl_server_distillation()


# The formula


@pytest.mark.parametrize(
    ("beta", "expected"),
    [
        (0.0, 0.6 * math.log(1.2) + 0.2 * math.log(0.8) + 0.2 * math.log(0.8)),
        (1.0, 0.5 * math.log(5 / 6) + 0.25 * math.log(1.25) + 0.25 * math.log(1.25)),
        # m = (0.55, 0.225, 0.225)
        (
            0.5,
            0.5 * (0.6 * math.log(0.6 / 0.55) + 0.4 * math.log(0.2 / 0.225))
            + 0.5 * (0.5 * math.log(0.5 / 0.55) + 0.5 * math.log(0.25 / 0.225)),
        ),
    ],
)
def test_two_tokens_and_the_rest_by_hand(beta: float, expected: float) -> None:
    """The teacher's best tokens are 2 and 0, 0.6 and 0.2; the others have 0.2 together."""
    policy = torch.tensor([[0.25, 0.125, 0.5, 0.125]]).log()
    cells = top_and_rest(policy, torch.tensor([[2, 0]]), torch.tensor([[0.6, 0.2]]).log())
    assert [x.exp()[0].tolist() for x in cells] == [
        pytest.approx([0.5, 0.25, 0.25]), pytest.approx([0.6, 0.2, 0.2]),
    ]  # fmt: skip
    assert jensen_shannon(*cells, beta).tolist() == pytest.approx([expected], abs=1e-7)


def test_all_tokens_but_one_give_the_divergence_over_the_vocabulary() -> None:
    torch.manual_seed(0)
    logits = torch.randn(2, 50, 12, dtype=torch.float64)
    policy, teacher = torch.log_softmax(3 * logits, -1)
    logprobs, ids = teacher.topk(11)
    for beta in BETAS:
        found = jensen_shannon(*top_and_rest(policy, ids, logprobs), beta)
        assert torch.allclose(found, jensen_shannon(policy, teacher, beta), atol=1e-6)
        coarse = jensen_shannon(*top_and_rest(policy, ids[:, :3], logprobs[:, :3]), beta)
        assert (coarse <= found + 1e-6).all()


@pytest.mark.parametrize("beta", BETAS)
@pytest.mark.parametrize("elements", [1 << 20, 60], ids=["one chunk", "many chunks"])
def test_values_and_gradients_are_those_of_trl(
    beta: float, elements: int, trl: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(chunked_divergence.CHUNK_ELEMENTS, "cpu", elements)
    torch.manual_seed(0)
    hidden, weight, bias = torch.randn(11, 8), torch.randn(23, 8), torch.randn(23)
    leaf, peer = hidden.clone().requires_grad_(), hidden.double().requires_grad_()
    of_loss, targets = torch.rand(11), torch.randint(23, (11,))
    logprobs, ids = torch.log_softmax(2 * torch.randn(11, 23), -1).topk(5)
    teacher = TeacherTop(ids, logprobs, torch.zeros(11), None, partial(jensen_shannon, beta=beta))
    values, _ = teacher.compare(leaf, tokens_of(targets), Head(weight, bias), 1.0)
    (values * of_loss).sum().backward()
    logits = torch.nn.functional.linear(peer, weight.double(), bias.double())
    whole = torch.log_softmax(logits, -1)
    own, valid = whole.gather(1, ids), torch.ones_like(ids, dtype=torch.bool)
    (own, mask), (of_teacher, _) = (trl._add_tail_bucket(x, valid) for x in (own, logprobs.double()))
    expected = trl._jsd_divergence(own, of_teacher, beta, mask).sum(-1)
    (expected * of_loss).sum().backward()
    exact = jensen_shannon(*top_and_rest(whole, ids, logprobs.double()), beta)
    assert torch.allclose(exact, expected, rtol=1e-9, atol=1e-12)
    assert torch.allclose(values.double(), expected, rtol=1e-6, atol=1e-6)
    assert leaf.grad is not None
    assert peer.grad is not None
    assert relative_difference(leaf.grad, peer.grad) < 2e-6


def test_no_tensor_holds_the_logits_of_all_tokens(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(chunked_divergence.CHUNK_ELEMENTS, "cpu", 4000)
    hidden, weight = torch.randn(60, 4, requires_grad=True), torch.randn(1000, 4)
    ids, logprobs = torch.arange(120).view(60, 2), torch.full((60, 2), -1.0)
    teacher = TeacherTop(ids, logprobs, torch.zeros(60), None, partial(jensen_shannon, beta=0.5))
    with Largest() as seen:
        teacher.compare(hidden, tokens_of(torch.zeros(60).long()), Head(weight), 1.0)[0].sum().backward()
    assert seen.elements == 4 * 1001


def test_a_token_of_a_larger_vocabulary_is_among_the_rest() -> None:
    policy = torch.tensor([[0.25, 0.125, 0.5, 0.125]]).log()
    for outside in (4, 900):
        ids, teacher = torch.tensor([[2, outside, 0]]), torch.tensor([[0.6, 0.1, 0.2]]).log()
        found = top_and_rest(policy, ids, teacher)
        assert [x.exp()[0].tolist() for x in found] == [
            pytest.approx([0.5, 0, 0.25, 0.25]), pytest.approx([0.6, 0, 0.2, 0.2]),
        ]  # fmt: skip
        without = top_and_rest(policy, ids[:, ::2], teacher[:, ::2])
        for beta in BETAS:
            assert torch.equal(jensen_shannon(*found, beta), jensen_shannon(*without, beta))


def test_a_sure_policy_keeps_its_rest_and_a_sure_teacher_has_a_least_one() -> None:
    """The policy's rest, 2 exp(-40), would be lost in 1 - x; the teacher's rounds to less than nothing."""
    logits = torch.tensor([[40.0, 40.0, 0.0, 0.0]], requires_grad=True)
    policy, teacher = top_and_rest(
        torch.log_softmax(logits, -1), torch.tensor([[0, 1]]), torch.tensor([[0.6, 0.4 + 1e-6]]).log()
    )
    assert policy[0, 2].item() == pytest.approx(-40, rel=1e-6)
    assert teacher[0, 2].exp().item() == pytest.approx(1e-7)
    for beta in BETAS:
        value = jensen_shannon(policy, teacher, beta)
        (slope,) = torch.autograd.grad(value.sum(), logits, retain_graph=True)
        assert value.isfinite().all()
        assert slope.isfinite().all()


# The server, the file, the trainer


def best_of(logprobs: Tensor, count: int) -> list[dict[int, float]]:
    """[C, V] -> the `count` most likely tokens of each place, as a server gives them."""
    values, ids = logprobs.topk(count)
    return [dict(zip(*x, strict=True)) for x in zip(ids.tolist(), values.tolist(), strict=True)]


def calls_of(groups: Sequence[Group]) -> list[Call]:
    return [call for group in groups for t in group.trajectories for call in t.calls]


def test_the_best_tokens_are_stored_bit_for_bit_in_typed_columns(tmp_path: Path) -> None:
    """The server gives the sampled token besides, in any order."""
    third = torch.tensor(1 / 3).item()  # a float32, as a server has it

    def best(ids: list[int], count: int) -> list[dict[int, float]]:
        return [{token + 2: -1.5, token + 1: -third} for token in ids[1:]]

    with teacher_server(None, lambda ids: [-2.0] * (len(ids) - 1), best=best) as stub:
        config = config_of(stub.url, name="sdpo", reward_weight=1.0, teacher_beta=0.0, teacher_top_k=2)
        groups, _ = taught(config, with_prompts(groups_of(random_samples(0))))
    for call in calls_of(groups):
        is_taught = bool(call.teacher_prompt_token_ids)
        ids = [x for token in call.completion_token_ids for x in (token + 1, token + 2)] if is_taught else []
        assert call.teacher_top_ids.tolist() == ids
        assert call.teacher_top_logprobs.tolist() == [-third, -1.5] * (len(ids) // 2)
    path = tmp_path / "step.parquet"
    write_rollouts(path, groups)
    pairs = zip(calls_of(read_rollouts(path)), calls_of(groups), strict=True)
    assert all(a == replace(b, sampling_logprobs=a.sampling_logprobs) for a, b in pairs)
    shapes = [(e.extras[TEACHER_TOP_IDS].shape, len(e.scored)) for e in read_examples(path) if e.extras]
    assert len(shapes) == 12
    assert all(shape == (count, 2) for shape, count in shapes)
    table = pq.read_table(path)
    assert table.schema.field(TEACHER_TOP_IDS).type == pa.list_(pa.int32())
    assert table.schema.field(TEACHER_TOP_LOGPROBS).type == pa.list_(pa.float32())
    place = table.schema.get_field_index(TEACHER_TOP_IDS)
    for damaged in (
        pa.array([[1, 2, 3]] * len(table), pa.list_(pa.int32())),
        pa.nulls(len(table), pa.list_(pa.int32())),
        pa.array([[None, 1]] * len(table), pa.list_(pa.int32())),
    ):
        pq.write_table(table.set_column(place, table.schema.field(place), damaged), path)
        with pytest.raises(DataError, match="not a usable rollout file"):
            read_examples(path)
    assert rollout_bytes(config) == 3 * rollout_bytes(config_of(stub.url))


@pytest.mark.parametrize(
    ("beta", "budget", "has_head"),
    [(0.0, 4096, True), (0.5, 60, True), (1.0, 60, False)],
    ids=["forward", "many passes", "logits"],
)
def test_a_step_has_the_gradient_of_trls_loss(
    beta: float, budget: int, has_head: bool, trl: Any, tiny_llama: Path, tmp_path: Path, dist: Any
) -> None:
    """The base teaches on a server, in another order and with a third of the completions left out."""
    config = config_of(
        "http://127.0.0.1:1", name="sdpo", teacher_beta=beta, teacher_top_k=4, teacher_model=""
    ).model_copy(update={"trainer": settings(trainer={"tokens_per_micro_batch": budget}).trainer})
    rows, prompt = random_samples(0), [7, 8, 9]
    policy = policy_of(tiny_llama, config, dist)
    policy = policy if has_head else replace(policy, lm_head=None)
    plain = plain_model(tiny_llama, policy, config)

    def logprobs(ids: list[int]) -> Tensor:
        with base_of(plain):
            return torch.log_softmax(plain(torch.tensor([ids])).logits[0, :-1], -1)

    def scores(ids: list[int]) -> list[float]:
        return list(logprobs(ids).gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist())

    with teacher_server(None, scores, best=lambda ids, count: best_of(logprobs(ids), count)) as stub:
        algorithm = config.algorithm.model_copy(update={"teacher": stub.url})
        groups, _ = taught(config.model_copy(update={"algorithm": algorithm}), with_prompts(groups_of(rows)))
    write_rollouts(tmp_path / "step.parquet", groups)
    examples = read_examples(tmp_path / "step.parquet")
    metrics = train_step(trainer := make_trainer(policy, config, dist), examples, 1)
    total, count = torch.zeros(()), 0
    for i, row in enumerate(rows):
        if i % 4 == 2:
            continue
        with base_of(plain):
            whole = torch.log_softmax(logits_of(plain, row, prompt, 1.0), -1)
        best, ids = whole.topk(4)
        own = torch.log_softmax(logits_of(plain, row, row.prompt_token_ids, 1.0), -1).gather(1, ids)
        valid = torch.ones_like(ids, dtype=torch.bool)
        (own, mask), (best, _) = (trl._add_tail_bucket(x, valid) for x in (own, best))
        total, count = total + trl._jsd_divergence(own, best, beta, mask).sum(), count + len(ids)
    (total / count).backward()
    assert relative_difference(trainer.optimizer.grads, flat_gradient(plain, policy)) < 1e-5
    assert metrics["teacher/divergence"] == pytest.approx(total.item() / count, rel=1e-5)
    other = config.model_copy(update={"algorithm": config.algorithm.model_copy(update={"teacher_top_k": 5})})
    with pytest.raises(DataError, match="no logprobs of the 5 most likely tokens"):
        train_step(make_trainer(policy, other, dist), examples, 2)


# Before a run


def test_a_server_that_gives_fewer_is_refused_with_its_flag() -> None:
    algorithm = {"name": "gkd", "teacher_top_k": 50}
    with teacher_server(tiny_tokenizer(), flat) as stub:
        with pytest.raises(ConfigError, match="prompt logprobs of 50, which is greater than max") as error:
            check(stub, algorithm=algorithm)
        assert error.value.exit_code == 2
        assert "--max-logprobs" in error.value.hint
        stub.best = lambda ids, count: [{7: -1.0} for _ in ids[1:]]
        with pytest.raises(ConfigError, match=r"logprobs of [12] tokens, fewer than .*teacher_top_k=50"):
            check(stub, algorithm=algorithm)
        stub.best = lambda ids, count: [{i: -1.0 - i for i in range(count)} for _ in ids[1:]]
        assert check(stub, algorithm=algorithm)[0].algorithm.teacher_top_k == 50
        stub.best = lambda ids, count: [dict.fromkeys(range(count), -9999.0) for _ in ids[1:]]
        with pytest.raises(ConfigError, match=r"token \d+ the logprob -9999.0, which is none"):
            check(stub, algorithm=algorithm)


@pytest.mark.parametrize(
    ("algorithm", "sentence"),
    [
        ({"name": "gkd", "teacher": "http://h"}, "set algorithm.teacher_top_k=20"),
        (
            {"name": "opd", "teacher": "http://h", "teacher_top_k": 5},
            "no effect with algorithm.teacher_beta=none",
        ),
        ({"name": "gkd", "teacher_top_k": 5}, "teacher=base, which gives its whole distrib"),
        ({"teacher_top_k": 5}, "teacher_top_k=5 has no effect with algorithm.name=grpo"),
    ],
)
def test_settings_without_a_sense_are_refused(algorithm: dict[str, Any], sentence: str) -> None:
    with pytest.raises(ValidationError, match=sentence):
        settings(algorithm=algorithm)
