"""Random trees of calls: the gradient is that of padded rows, for any cut, and of finite differences."""

from __future__ import annotations

import random
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch

from skylite.model.packing import Packing
from skylite.model.process_group import Dist
from skylite.trainer.micro_batches import pack
from skylite.trainer.trainer import make_algorithm
from tests.cases import (
    gradients_after_step,
    plain_model,
    policy_of,
    reference_gradient,
    relative_difference,
    table_of,
)
from tests.rows import Row, random_call_trees
from tests.small_run import settings

SEEDS = range(6)
BUDGETS = (4096, 60, 25, 16)
"""Tokens of a micro-batch: all in one, some cuts, and cuts between the calls of a trajectory."""


def test_the_trees_continue_branch_repeat_and_begin_anew() -> None:
    kinds = set()
    for row in (row for seed in SEEDS for row in random_call_trees(seed)):
        for (prompt, completion), (after, _) in pairwise(row.all_calls):
            if after[: len(prompt + completion)] == prompt + completion:
                kinds.add("continue")
            elif after == prompt:
                kinds.add("repeat")
            elif after[0] == prompt[0]:
                kinds.add("branch")
            else:
                kinds.add("sub-agent")
    assert kinds == {"continue", "repeat", "branch", "sub-agent"}


def differences(seed: int, model: Path, dist: Dist) -> dict[int, float]:
    """Budget -> the gradient's relative difference from that of padded single rows."""
    rows, config = random_call_trees(seed), settings()
    policy = policy_of(model, config, dist)
    expected = reference_gradient(plain_model(model, policy, config), policy, config, rows)
    found = {}
    for budget in BUDGETS:
        cut = settings(trainer={"tokens_per_micro_batch": budget})
        got, metrics = gradients_after_step(policy, cut, dist, rows)
        assert metrics["tokens/unique"] <= metrics["tokens/total"]
        found[budget] = float(relative_difference(got, expected))
    return found


@pytest.mark.parametrize("seed", SEEDS)
def test_a_random_tree_has_the_gradient_of_padded_rows_for_any_cut(
    seed: int, tiny_llama: Path, dist: Dist
) -> None:
    assert max(differences(seed, tiny_llama, dist).values()) < 1e-5


CUTTABLE = (
    {"algorithm": {"policy_loss": "clip_cov", "updates_per_step": 2}},
    {"algorithm": {"kl_coef": 0.1, "kl_in": "reward"}},
    {"algorithm": {"aggregation": "seq-mean-token-mean", "entropy_coef": 0.01, "top_entropy_quantile": 0.5}},
)
JOINED = (
    {"algorithm": {"policy_loss": "gspo"}},
    {"importance": {"level": "sequence"}},
    {"importance": {"reject_kl": 50.0}},
    {"algorithm": {"name": "reinforce++", "kl_coef": 0.1}},
)


@pytest.mark.parametrize("packing", ["tree", "padded"])
@pytest.mark.parametrize(("sections", "cut"), [*((s, True) for s in CUTTABLE), *((s, False) for s in JOINED)])
def test_a_cut_inside_a_trajectory_changes_no_gradient(
    sections: dict[str, Any], cut: bool, packing: Packing, tiny_llama: Path, dist: Dist
) -> None:
    """Trajectories whose tokens depend on each other are not cut."""
    rows = random_call_trees(3)
    gradients, cuts = [], []
    for budget in (4096, 16):
        config = settings(**sections, trainer={"tokens_per_micro_batch": budget})
        policy = policy_of(tiny_llama, config, dist, packing)
        updates = pack(table_of(rows, config), make_algorithm(config), policy, config, dist)
        numbers = [n for update in updates for micro in update for n in micro.numbers]
        cuts.append(len(numbers) > len(set(numbers)))
        gradients.append(gradients_after_step(policy, config, dist, rows)[0])
    assert cuts == [False, cut]
    assert relative_difference(gradients[1], gradients[0]) < 1e-5


def test_padded_rows_of_a_random_tree_have_the_same_gradient(tiny_llama: Path, dist: Dist) -> None:
    rows, config = random_call_trees(7), settings(trainer={"tokens_per_micro_batch": 90})
    tree, padded = (
        gradients_after_step(policy_of(tiny_llama, config, dist, packing), config, dist, rows)[0]
        for packing in ("tree", "padded")
    )
    assert relative_difference(tree, padded) < 1e-5


def test_the_gradient_is_that_of_finite_differences_in_float64(tiny_llama: Path, dist: Dist) -> None:
    """The loss is -sum(A * logprob) / tokens: with ratios of 1 its gradient is that of the clipped loss."""
    rows = random_call_trees(2)
    config = settings(algorithm={"name": "dr_grpo", "aggregation": "token-mean"}, importance={"mode": "none"})
    policy = policy_of(tiny_llama, config, dist)
    got, _ = gradients_after_step(policy, config, dist, rows)
    model = in_float64(plain_model(tiny_llama, policy, config))
    parameters = [dict(model.named_parameters())[name] for name in policy.lora]
    starts = torch.tensor([0, *(p.numel() for p in parameters)]).cumsum(0).tolist()
    rng, largest = random.Random(0), int(got.abs().argmax())
    for place in [largest, *(rng.randrange(len(got)) for _ in range(7))]:
        number = max(i for i, start in enumerate(starts) if start <= place)
        weights, index = parameters[number].data.view(-1), place - starts[number]
        assert abs(slope(model, rows, weights, index) - float(got[place])) < 1e-5 * float(got.abs().max())


def in_float64(model: Any) -> Any:
    """The model in float64 throughout: transformers' norms and its eager softmax compute in float32."""
    model.double()
    model.get_base_model().set_attn_implementation("sdpa")
    for module in model.modules():
        if type(module).__name__.endswith("RMSNorm"):
            module.forward = lambda x, m=module: (
                m.weight * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + m.variance_epsilon)
            )
    return model


@torch.no_grad()
def slope(model: Any, rows: list[Row], weights: torch.Tensor, index: int, step: float = 1e-4) -> float:
    before, found = float(weights[index]), []
    for value in (before + step, before - step):
        weights[index] = value
        found.append(loss(model, rows))
    weights[index] = before
    return (found[0] - found[1]) / (2 * step)


def loss(model: Any, rows: list[Row]) -> float:
    total, num_tokens = 0.0, sum(len(row.completion_token_ids) for row in rows)
    for row in rows:
        group = [other.reward for other in rows if other.group == row.group]
        advantage = row.reward - sum(group) / len(group)
        for prompt, completion in row.all_calls:
            logits = model(input_ids=torch.tensor([prompt + completion])).logits[0, len(prompt) - 1 : -1]
            logprobs = torch.log_softmax(logits.double(), dim=1)
            total -= advantage * float(logprobs[range(len(completion)), completion].sum()) / num_tokens
    return total
