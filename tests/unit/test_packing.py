"""Logprobs, packing and schedules against values computed by hand."""

import numpy as np
import pytest
import torch

from skylite.config.train import OptimConfig
from skylite.errors import DataError
from skylite.model.chunked_logprobs import HEAD_CHUNK_ELEMENTS, head_logprobs, token_logprobs
from skylite.model.packing import pack_padded, pack_tree, upload
from skylite.trainer.optimizer import rate_factor
from skylite.types import TrainingExample, completion_example
from tests.cases import table_of
from tests.rows import Row
from tests.small_run import settings

CPU = torch.device("cpu")


def sample(group: int) -> Row:
    return Row(
        group=group,
        prompt_token_ids=[1],
        completion_token_ids=[2],
        sampling_logprobs=[-1.0],
        reward=0.0,
        truncated=False,
    )


@pytest.mark.parametrize("wanted", ["logprobs", "entropy", "both"])
@pytest.mark.parametrize("chunk_elements", [1 << 24, 22])
def test_token_logprobs_and_entropy_equal_log_softmax_and_its_gradient(monkeypatch, wanted, chunk_elements):
    # 22 elements: two of the five rows per chunk, so the last is alone. Row 3 is wanted twice.
    monkeypatch.setattr("skylite.model.chunked_logprobs.ROW_CHUNK_ELEMENTS", chunk_elements)
    torch.manual_seed(0)
    logits = 3 * torch.randn(5, 11)
    rows, targets = torch.tensor([0, 3, 3, 4]), torch.tensor([2, 0, 7, 7])
    of_logprobs = torch.tensor([1.0, -2.0, 0.5, 3.0]) * (wanted != "entropy")
    of_entropy = torch.tensor([2.0, 0.5, -1.0, 4.0]) * (wanted != "logprobs")
    mine, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()

    got, entropy = token_logprobs(mine * 1.0, rows, targets, temperature=0.7)
    wants = {"logprobs": (got * of_logprobs).sum(), "entropy": (entropy * of_entropy).sum()}
    (sum(wants.values()) if wanted == "both" else wants[wanted]).backward()
    table = torch.log_softmax(plain / 0.7, dim=1)
    plain_entropy = -(table.exp() * table).sum(1)
    (table[rows, targets] @ of_logprobs + plain_entropy[rows] @ of_entropy).backward()

    assert torch.allclose(got, table[rows, targets], atol=1e-5)
    assert torch.allclose(entropy, plain_entropy[rows], atol=1e-5)
    assert mine.grad is not None
    assert plain.grad is not None
    assert mine.grad.abs().max() > 0.1
    assert torch.allclose(mine.grad, plain.grad, atol=3e-6 * float(plain.grad.abs().max()))


@pytest.mark.parametrize("pack", [pack_padded, pack_tree])
def test_each_completion_token_is_predicted_by_the_token_before_it(pack):
    # prompt [7, 8], completion [9, 10, 11]: the rows of 8, 9 and 10 predict; 11 is never an input.
    tokens = pack([completion_example([7, 8], [9, 10, 11])], CPU)
    assert tokens.inputs["input_ids"].tolist() == [[7, 8, 9, 10]]
    kept = tokens.inputs["logits_to_keep"][tokens.rows].tolist()
    assert [tokens.inputs["input_ids"][0, k].item() for k in kept] == [8, 9, 10]
    assert tokens.targets.tolist() == [9, 10, 11]
    assert (tokens.segments.tolist(), tokens.num_segments) == ([0, 0, 0], 1)


@pytest.mark.parametrize("pack", [pack_padded, pack_tree])
def test_outputs_of_all_positions_are_those_of_the_kept_ones(pack):
    """Some models ignore logits_to_keep."""
    tokens = pack([completion_example([7, 8], [9, 10]), completion_example([7, 8], [11, 12, 13])], CPU)
    whole = tokens.inputs["input_ids"][..., None]  # as if the model copied its input
    kept = tokens.kept(whole)
    assert kept.flatten()[tokens.rows].tolist() == [8, 9, 8, 11, 12]
    assert kept.shape[1] < whole.shape[1]
    assert tokens.kept(kept) is kept


@pytest.mark.parametrize("pack", [pack_padded, pack_tree])
def test_the_tokens_with_a_weight_are_scored_wherever_they_stand(pack):
    """A chat of two replies, 9 and 11 12. Nothing behind the last one is an input."""
    weights = np.array([0, 0, 1, 0, 0.5, 1, 0], dtype=np.float32)
    chat = TrainingExample(token_ids=np.array([7, 8, 9, 10, 11, 12, 13]), weights=weights, group=0)
    tokens = pack([chat], CPU)
    assert tokens.inputs["input_ids"].tolist() == [[7, 8, 9, 10, 11]]
    kept = tokens.inputs["logits_to_keep"][tokens.rows].tolist()
    assert [tokens.inputs["input_ids"][0, k].item() for k in kept] == [8, 10, 11]
    assert tokens.targets.tolist() == [9, 11, 12]


def test_samples_are_ordered_by_group():
    table = table_of([sample(4), sample(2), sample(4), sample(2)], settings())
    assert [calls[0].prompt_id for calls in table.trajectories] == ["test/2"] * 2 + ["test/4"] * 2
    assert (table.rewards.tolist(), table.lengths.tolist()) == ([[0.0] * 2] * 2, [[1.0] * 2] * 2)


def test_groups_of_different_sizes_are_refused():
    with pytest.raises(DataError, match="same number"):
        table_of([sample(0), sample(0), sample(1)], settings())


def test_learning_rate_schedules():
    def rates(schedule: str, warmup: int = 0) -> list[float]:
        config = OptimConfig(schedule=schedule, warmup_steps=warmup)
        return [rate_factor(step, 4, config) for step in (1, 2, 3, 4)]

    assert rates("constant", 2) == [0.5, 1.0, 1.0, 1.0]
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates("linear", 2) == [0.5, 1.0, 1.0, 0.5]
    # (1 + cos(k pi / 4)) / 2 for k = 0 .. 3
    assert rates("cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])


@pytest.mark.parametrize("softcap", [None, 5.0])
@pytest.mark.parametrize("chunk", [300, 300 * 7, 1 << 22], ids=["row by row", "seven rows", "all rows"])
@pytest.mark.parametrize("through_entropy", [0.0, None, 1.0])
def test_logprobs_from_hidden_states_equal_those_from_logits(softcap, chunk, through_entropy, monkeypatch):
    """Three gradients: logprobs with a zero entropy gradient, logprobs without entropy, and both."""
    torch.manual_seed(0)
    if chunk < 1 << 22:
        monkeypatch.setattr("skylite.model.chunked_logprobs.BLOCK_ROWS", chunk // 300)
        monkeypatch.setattr("skylite.model.chunked_logprobs.BLOCK_VOCAB", 37)
    monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, "cpu", chunk)
    hidden, weight, bias = torch.randn(50, 16), torch.randn(300, 16), torch.randn(300)
    rows, targets = torch.randint(0, 50, (80,)), torch.randint(0, 300, (80,))
    on_logprobs, on_entropies = torch.randn(80), torch.randn(80) * (through_entropy or 0.0)
    mine, plain = hidden.clone().requires_grad_(), hidden.clone().requires_grad_()
    got, entropy = head_logprobs(mine, weight, bias, rows, targets, temperature=0.7, softcap=softcap)
    (
        (got * on_logprobs).sum() + (0.0 if through_entropy is None else (entropy * on_entropies).sum())
    ).backward()
    scores = plain @ weight.T + bias
    table = torch.log_softmax(
        (scores if softcap is None else torch.tanh(scores / softcap) * softcap) / 0.7, dim=1
    )
    expected, expected_entropy = table[rows, targets], -(table.exp() * table).sum(1)[rows]
    ((expected * on_logprobs).sum() + (expected_entropy * on_entropies).sum()).backward()
    assert torch.allclose(got, expected, atol=1e-5)
    assert torch.allclose(entropy, expected_entropy, atol=1e-5)
    assert mine.grad is not None
    assert plain.grad is not None
    assert torch.allclose(mine.grad, plain.grad, atol=3e-6 * float(plain.grad.abs().max()))


def test_logprobs_are_never_positive_and_a_certain_token_has_no_entropy():
    weight = torch.randn(5000, 64, generator=torch.Generator().manual_seed(0))
    hidden = (weight[[4000, 17]] * 10).requires_grad_()
    logprobs, entropies = head_logprobs(
        hidden, weight, None, torch.tensor([0, 1]), torch.tensor([4000, 17]), temperature=0.5
    )
    assert logprobs.tolist() == [0, 0]
    assert entropies.tolist() == pytest.approx([0, 0], abs=1e-6)
    (grad,) = torch.autograd.grad(logprobs.sum(), hidden)
    assert grad.abs().max() == 0


def test_logprobs_are_bit_equal_with_and_without_a_gradient():
    """KL-Cov needs this: |log ratio| has a gradient of 1 or -1 wherever rounding differs."""
    generator = torch.Generator().manual_seed(0)
    hidden, weight = torch.randn(9, 64, generator=generator), torch.randn(5000, 64, generator=generator)
    rows, targets = torch.arange(9), torch.arange(9) * 500
    learned = head_logprobs(hidden.clone().requires_grad_(), weight, None, rows, targets, temperature=0.7)
    looked = head_logprobs(hidden, weight, None, rows, targets, temperature=0.7)
    assert torch.equal(learned[0], looked[0])
    assert torch.equal(learned[1], looked[1])


def test_logprobs_in_bfloat16_do_not_depend_on_the_size_of_a_chunk(monkeypatch):
    """GPUs compute in bfloat16, and there the backward pass recomputes the chunks."""
    torch.manual_seed(0)
    hidden, weight = torch.randn(50, 16).bfloat16(), torch.randn(300, 16).bfloat16()
    rows, targets, on = torch.randint(0, 50, (80,)), torch.randint(0, 300, (80,)), torch.randn(80)
    found = []
    for elements in (300 * 7, HEAD_CHUNK_ELEMENTS["cpu"], HEAD_CHUNK_ELEMENTS["cuda"]):
        monkeypatch.setitem(HEAD_CHUNK_ELEMENTS, "cpu", elements)
        mine = hidden.clone().requires_grad_()
        logprobs, entropies = head_logprobs(mine, weight, None, rows, targets, temperature=0.7)
        (grad,) = torch.autograd.grad((logprobs * on + entropies).sum(), mine)
        found.append((logprobs, entropies, grad))
    for some in found[1:]:
        torch.testing.assert_close(some, found[0])


def test_arrays_without_elements_are_uploaded_beside_others() -> None:
    """A rank may get a micro-batch without a trajectory."""
    ids, weights = upload([np.zeros(0, np.int64), np.array([1.5, 2.5], np.float32)], torch.device("cpu"))
    assert (ids.dtype, ids.shape) == (torch.int64, (0,))
    assert weights.tolist() == [1.5, 2.5]
    assert upload([np.zeros((2, 0), np.float32)], torch.device("cpu"))[0].shape == (2, 0)
