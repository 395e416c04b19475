"""sft and dpo have the losses and gradients of TRL's SFTTrainer and DPOTrainer.

Once on random logprobs, and once on a tiny model, which TRL runs row by row and we as a prefix tree.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from skylite.algorithms.losses import BatchSize, LossInputs
from skylite.config.train import TrainConfig
from skylite.model.packing import Packing
from skylite.model.process_group import Dist
from skylite.trainer.micro_batches import MicroBatch
from skylite.trainer.precompute import loss_inputs
from skylite.trainer.step import held_out_metrics, train_step
from skylite.trainer.trainer import Trainer, make_algorithm
from skylite.types import TrainingExample, completion_example
from tests.cases import optimizer_of, plain_model, policy_of, relative_difference
from tests.small_run import settings
from tests.unit.peer_cases import SHAPES, TOLERANCE, Case, make_case, packed, shape_id
from tests.unit.peer_code import OneProcess, load_trl_supervised

IGNORED = -100


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    return load_trl_supervised()


@pytest.fixture(params=SHAPES, ids=shape_id)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(*request.param)


class Process(OneProcess):
    parallelism_config = None

    def gather_for_metrics(self, values: Tensor) -> Tensor:
        return values

    def unwrap_model(self, model: Any) -> Any:
        return model


def trainer_of(kind: Any, **fields: Any) -> Any:
    """One of TRL's trainers without its __init__: only the attributes that its loss reads."""
    trainer = object.__new__(kind)
    vars(trainer).update(
        {
            "model": torch.nn.Linear(1, 1),
            "accelerator": Process(),
            "args": SimpleNamespace(loss_type="nll", average_tokens_across_devices=False),
            "aux_loss_enabled": False,
            "compute_loss_func": None,
            "label_smoother": None,
            "_total_train_tokens": 0,
            "_tp_size": 1,
            "_metrics": {"train": defaultdict(list)},
        }
        | fields
    )
    return trainer


def outputs_of(logprobs: Tensor, mask: Tensor) -> SimpleNamespace:
    """What TRL's models return: [B, T - 1] numbers of the labels, 0 where there is none."""
    zeros = torch.zeros_like(logprobs)
    return SimpleNamespace(
        log_probs=logprobs * mask,
        label_mask=mask,
        entropy=zeros,
        is_top1=mask & (zeros > 0),
        mean_logits=zeros,
    )


def trl_sft(trl: SimpleNamespace, model: Any, ids: Tensor, mask: Tensor) -> Tensor:
    """SFTTrainer's loss. `mask`: the tokens [B, T] with a label."""
    inputs = {"input_ids": ids, "labels": ids.masked_fill(~mask, IGNORED), "attention_mask": mask.long()}
    loss: Tensor = trainer_of(trl.sft.SFTTrainer).compute_loss(model, inputs)
    return loss


def trl_dpo(
    trl: SimpleNamespace,
    model: Any,
    ids: Tensor,
    mask: Tensor,
    ref: Tensor,
    beta: float,
    loss_type: str = "sigmoid",
) -> tuple[Tensor, dict[str, list[float]]]:
    """DPOTrainer's loss and metrics. All chosen rows stand before all rejected ones."""
    trainer = trainer_of(
        trl.dpo.DPOTrainer,
        beta=beta,
        ld_alpha=None,
        precompute_ref_logps=True,
        f_divergence_type="reverse_kl",
        loss_types=[loss_type],
        loss_weights=[1.0],
        use_weighting=False,
    )
    chosen, rejected = ref.chunk(2)
    inputs = {
        "input_ids": ids,
        "attention_mask": torch.ones_like(ids),
        "completion_mask": mask.long(),
        "ref_chosen_logps": chosen,
        "ref_rejected_logps": rejected,
    }
    loss: Tensor = trainer._compute_loss(model, inputs, False)
    return loss, trainer._metrics["train"]


def with_prompt(x: Tensor) -> Tensor:
    """[B, T] -> [B, T + 1] with a token of a prompt."""
    return torch.cat([x[:, :1], x], dim=1)


def micro_batch(case: Case, config: TrainConfig) -> MicroBatch:
    size = BatchSize(int(case.mask.sum()), len(case.mask), 1)
    algorithm = make_algorithm(config)
    weights = torch.full((size.num_tokens,), algorithm.weight(1, size), dtype=case.policy.dtype)
    return MicroBatch(
        examples=[],
        numbers=[],
        tokens=packed(case),
        keys=torch.arange(size.num_tokens),
        token_weights=weights,
        size=size,
        sampling_logprobs=None,
    )


def test_sft_equals_trl(trl: SimpleNamespace, case: Case) -> None:
    leaf, ours = case.policy.clone().requires_grad_(), case.policy[case.mask].requires_grad_()
    mask = with_prompt(case.mask)
    mask[:, 0] = False
    ids = torch.zeros_like(mask, dtype=torch.int64)
    theirs = trl_sft(trl, lambda **_: outputs_of(leaf, case.mask), ids, mask)
    config = settings(algorithm={"name": "sft"})
    entropies = torch.zeros_like(ours)
    loss, sums = make_algorithm(config).loss(loss_inputs(micro_batch(case, config), ours, entropies))
    assert float(loss) == pytest.approx(float(theirs), rel=TOLERANCE)
    slopes = torch.autograd.grad(loss, ours)[0], torch.autograd.grad(theirs, leaf)[0][case.mask]
    torch.testing.assert_close(*slopes, rtol=TOLERANCE, atol=0)
    assert float(sums["loss/policy"]) == float(loss)


@pytest.mark.parametrize(("name", "beta"), [("dpo", 0.1), ("dpo", 1.0), ("ipo", 0.1), ("ipo", 0.5)])
def test_dpo_and_ipo_equal_trl(trl: SimpleNamespace, case: Case, name: str, beta: float) -> None:
    leaf, ours = case.policy.clone().requires_grad_(), case.policy[case.mask].requires_grad_()
    order = torch.cat([torch.arange(0, len(case.mask), 2), torch.arange(1, len(case.mask), 2)])
    mask = with_prompt(case.mask)[order]
    mask[:, 0] = False
    ids = torch.zeros_like(mask, dtype=torch.int64)
    ref = (case.ref * case.mask).sum(dim=1)[order]
    model = lambda **_: outputs_of(leaf[order], case.mask[order])  # noqa: E731
    loss_type = {"dpo": "sigmoid", "ipo": "ipo"}[name]
    theirs, logged = trl_dpo(trl, model, ids, mask, ref, beta, loss_type)
    config = settings(algorithm={"name": name, "beta": beta})
    x = loss_inputs(micro_batch(case, config), ours, torch.zeros_like(ours), case.ref[case.mask])
    loss, sums = make_algorithm(config).loss(x)
    # In float32, sums of hundreds of logprobs are rounded to 1e-5, and both sum in another order.
    tolerance = TOLERANCE if case.policy.dtype == torch.float64 else 1e-5
    assert float(loss) == pytest.approx(float(theirs), rel=tolerance)
    mine, other = torch.autograd.grad(loss, ours)[0], torch.autograd.grad(theirs, leaf)[0][case.mask]
    assert (mine - other).abs().max() <= tolerance * other.abs().max()
    names = {"chosen": "chosen", "rejected": "rejected", "margin": "margins", "accuracy": "accuracies"}
    for name, of_trl in names.items():
        assert float(sums[f"rewards/{name}"]) == pytest.approx(logged[f"rewards/{of_trl}"][0], rel=1e-4)


def chats() -> list[TrainingExample]:
    """Three chats; the first has two replies."""
    rng = np.random.default_rng(0)
    examples = [
        completion_example(rng.integers(0, 256, n).tolist(), rng.integers(0, 256, m).tolist(), group=group)
        for group, (n, m) in enumerate([(5, 9), (12, 3), (7, 4)])
    ]
    examples[0].weights[8:10] = 0
    return examples


def pairs() -> list[TrainingExample]:
    """Two pairs, in the order of a file: chosen, rejected."""
    rng = np.random.default_rng(1)
    return [
        completion_example(prompt, rng.integers(0, 256, m).tolist(), group=group, trajectory=side)
        for group in range(2)
        for prompt in [rng.integers(0, 256, 6).tolist()]
        for side, m in enumerate((4 + group, 7))
    ]


class Rows:
    """A plain model that returns what TRL's models do, for right-padded rows."""

    def __init__(self, model: Any) -> None:
        self.model = model

    def __call__(self, input_ids: Tensor, labels: Tensor, **_: Any) -> SimpleNamespace:
        logits = self.model(input_ids=input_ids).logits[:, :-1].float()
        table, mask = torch.log_softmax(logits, dim=-1), labels[:, 1:] != IGNORED
        logprobs = table.gather(2, input_ids[:, 1:, None])[..., 0]
        return outputs_of(logprobs, mask)


def padded(examples: Sequence[TrainingExample]) -> tuple[Tensor, Tensor]:
    """Token ids and labelled tokens [B, T]."""
    longest = max(len(e.token_ids) for e in examples)
    ids, mask = torch.zeros(len(examples), longest, dtype=torch.int64), torch.zeros(len(examples), longest)
    for row, e in enumerate(examples):
        ids[row, : len(e.token_ids)] = torch.from_numpy(e.token_ids)
        mask[row, : len(e.token_ids)] = torch.from_numpy(e.weights)
    return ids, mask > 0


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("budget", [4096, 16], ids=["one pass", "many passes"])
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_a_tiny_model_has_the_gradient_of_trl(
    name: str, budget: int, packing: Packing, trl: SimpleNamespace, tiny_llama: Path, dist: Dist
) -> None:
    rollout = {"prompts_per_step": 2 if name == "dpo" else 3, "group_size": 2, "temperature": 0.5}
    config = settings(algorithm={"name": name}, trainer={"tokens_per_micro_batch": budget}, rollout=rollout)
    policy = policy_of(tiny_llama, config, dist, packing)
    plain = plain_model(tiny_llama, policy, config)
    examples = chats() if name == "sft" else pairs()
    if name == "sft":
        loss = trl_sft(trl, Rows(plain), *padded(examples))
    else:
        ids, mask = padded([*examples[0::2], *examples[1::2]])
        with torch.no_grad(), plain.disable_adapter():
            ref = Rows(plain)(ids, ids.masked_fill(~mask, IGNORED)).log_probs.sum(dim=1)
        loss, _ = trl_dpo(trl, Rows(plain), ids, mask, ref, config.algorithm.beta)
    loss.backward()
    parameters = dict(plain.named_parameters())
    expected = torch.cat([parameters[n].grad.flatten() for n in policy.lora])
    optimizer = optimizer_of(policy, config)
    metrics = train_step(Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer), examples, 1)
    assert relative_difference(optimizer.grads, expected) < 1e-5
    assert metrics["loss/policy"] == pytest.approx(float(loss), rel=1e-5)
    assert metrics["tokens/completion"] == sum(len(e.scored) for e in examples)


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_held_out_rows_have_the_score_of_a_plain_model(
    name: str, packing: Packing, tiny_llama: Path, dist: Dist
) -> None:
    """Also where a step has several updates and micro-batches: the rows are one batch."""
    updates = {"algorithm": {"name": name, "updates_per_step": 2}, "trainer": {"tokens_per_micro_batch": 16}}
    config = settings(**updates, rollout={"prompts_per_step": 2, "group_size": 2, "temperature": 0.5})
    policy = policy_of(tiny_llama, config, dist, packing)
    plain = plain_model(tiny_llama, policy, config)
    examples = chats() if name == "sft" else pairs()
    ids, mask = padded(examples)
    with torch.no_grad():
        logprobs = torch.log_softmax(plain(input_ids=ids).logits[:, :-1], dim=-1)
        with plain.disable_adapter():
            ref = torch.log_softmax(plain(input_ids=ids).logits[:, :-1], dim=-1)
    targets, mask = ids[:, 1:, None], mask[:, 1:]
    if name == "sft":
        is_top = logprobs.argmax(-1, keepdim=True) == targets
        expected = {
            "eval/score": float(is_top[..., 0][mask].double().mean()),
            "eval/loss": float(-logprobs.gather(2, targets)[..., 0][mask].mean()),
        }
    else:
        gains = ((logprobs - ref).gather(2, targets)[..., 0] * mask).sum(dim=1)
        margins = config.algorithm.beta * (gains[0::2] - gains[1::2])
        expected = {
            "eval/score": float((margins > 0).double().mean()),
            "eval/loss": float(-torch.nn.functional.logsigmoid(margins).mean()),
            "eval/margin": float(margins.mean()),
        }
    trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer_of(policy, config))
    assert held_out_metrics(trainer, examples) == pytest.approx(expected, rel=1e-4)


def test_the_accuracy_of_sft_by_hand() -> None:
    """Four tokens of weight 1/4, of which three are the policy's most likely ones."""
    algorithm = make_algorithm(settings(algorithm={"name": "sft"}))
    logprobs, quarter = torch.tensor([-1.0, -2.0, -3.0, -6.0]), torch.full((4,), 0.25)
    x = LossInputs(
        policy_logprobs=logprobs, old_logprobs=logprobs, advantages=quarter, segments=torch.zeros(4).long(),
        num_segments=1, entropies=quarter, token_weights=quarter, is_top=torch.tensor([1, 1, 0, 1]) > 0,
    )  # fmt: skip
    loss, metrics = algorithm.loss(x)
    assert (float(loss), float(metrics["policy/accuracy"])) == (3.0, 0.75)


def test_both_sides_of_a_pair_share_their_prompt(tiny_llama: Path, dist: Dist) -> None:
    config = settings(algorithm={"name": "dpo"}, rollout={"prompts_per_step": 1, "group_size": 2})
    policy = policy_of(tiny_llama, config, dist, "tree")
    trainer = Trainer(config=config, dist=dist, policy=policy, optimizer=optimizer_of(policy, config))
    metrics = train_step(trainer, pairs()[:2], 1)
    assert metrics["tokens/unique"] == 6 + (4 - 1) + (7 - 1)
