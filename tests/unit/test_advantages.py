"""Advantages, returns and the overlong penalty against values computed by hand."""

import math
from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skylite.algorithms.advantages import (
    GROUP_ADVANTAGES,
    Components,
    gae,
    gdpo,
    moments,
    optimal_token_baseline,
    pass_at_k,
    remax,
    score_norms,
    token_returns,
    whiten,
    zero_std_groups,
)
from skylite.environments.single_turn import overlong_penalty

# Rewards of completions with 1, 1, 2 and 4 tokens: mean 2, sample variance (36 + 4 + 4 + 4) / 3 = 16.
REWARDS, LENGTHS = [8.0, 0.0, 0.0, 0.0], [1.0, 1.0, 2.0, 4.0]


def advantages_of(name: str, rewards: list[list[float]], lengths: list[list[float]]) -> list[list[float]]:
    return GROUP_ADVANTAGES[name](
        torch.tensor(rewards, dtype=torch.float64), torch.tensor(lengths, dtype=torch.float64)
    ).tolist()


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),  # 6 / 4 and -2 / 4
        ("dr_grpo", [6, -2, -2, -2]),
        ("rloo", [8, -8 / 3, -8 / 3, -8 / 3]),  # the others' mean: 0, and 8 / 3
        ("maxrl", [3, -1, -1, -1]),  # 6 / 2 and -2 / 2
        ("opo", [7, -1, -1, -1]),  # baseline 8 * 1 / (1 + 1 + 2 + 4) = 1
        # The eight tokens have 6, -2 seven times: mean -1, variance (7^2 + 7 * 1^2) / 7 = 8.
        ("reinforce++-baseline", [7 / 8**0.5, -1 / 8**0.5, -1 / 8**0.5, -1 / 8**0.5]),
    ],
)
def test_advantages_of_a_group(name, expected):
    assert advantages_of(name, [REWARDS], [LENGTHS])[0] == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "opo"])
def test_groups_are_independent_and_equal_rewards_give_zeros(name):
    alone = advantages_of(name, [REWARDS], [LENGTHS])[0]
    # the mean of seven 0.1s is not 0.1 in floating point
    both = advantages_of(
        name, [REWARDS * 2, [0.1] * 8, [0.0] * 8], [LENGTHS * 2, [1.0, 2, 3, 4, 5, 6, 7, 8], [1.0] * 8]
    )
    assert both[1] == both[2] == [0.0] * 8
    assert advantages_of(name, [REWARDS, [1.0, 0, 1, 0]], [LENGTHS, LENGTHS])[0] == alone


def test_remax_subtracts_the_reward_of_the_greedy_completion():
    rewards, greedy = torch.tensor([[1.0, 0.0], [0.5, 0.5]]), torch.tensor([[1.0, 1.0], [0.25, 0.25]])
    assert remax(rewards, greedy).tolist() == [[0, -1], [0.25, 0.25]]


def test_the_optimal_token_baseline_weighs_returns_by_the_norms_so_far():
    # Two completions of 3 and 2 tokens earn 1 and 0, with the norms 1, 2, 4 and 3, 0. The sums so far:
    # 1, 3, 7 and 3, 3. Baselines 1 / 4, 3 / 6; the last token stands alone and has none.
    rewards = torch.tensor([[0.0, 0, 1], [0, 0, 0]])
    norms, lengths = torch.tensor([[1.0, 2, 4], [3, 0, 0]]), torch.tensor([3, 2])
    found = optimal_token_baseline(rewards, norms, lengths)
    assert found.tolist() == [[0.75, 0.5, 1], [-0.25, -0.5, 0]]
    # With a penalty of 1.5 on the second token the first earns -0.5, -0.5, 1: baselines -0.5 / 4, -1.5 / 6.
    penalised = optimal_token_baseline(rewards - torch.tensor([[0, 1.5, 0], [0, 0, 0]]), norms, lengths)
    assert penalised.tolist() == [[-0.375, -0.25, 1], [0.125, 0.25, 0]]


def test_the_optimal_token_baseline_of_equal_returns_and_of_certain_tokens():
    norms, lengths = torch.rand(3, 4), torch.tensor([4, 2, 1])
    equal = torch.tensor([[0, 0, 0, 0.1], [0, 0.1, 0, 0], [0.1, 0, 0, 0]])
    assert optimal_token_baseline(equal, norms, lengths).tolist() == [[0.0] * 4] * 3
    last = torch.tensor([[0.0, 0, 0, 1], [0, 0, 0, 0], [0, 0, 0, 0.5]])
    certain = optimal_token_baseline(last, torch.zeros(3, 4), torch.tensor([4, 4, 4]))
    assert certain.tolist() == [[0.5] * 4, [-0.5] * 4, [0.0] * 4], "less the plain mean"
    # Equal sums that come at other times: returns 1, 0 and 1, 1.
    found = optimal_token_baseline(torch.tensor([[1.0, 0], [0, 1]]), torch.ones(2, 2), torch.tensor([2, 2]))
    assert found.tolist() == [[0.0, -0.5], [0.0, 0.5]]


def test_score_norms_are_those_of_the_gradient_by_the_logits():
    logits = torch.randn(5, 7, dtype=torch.float64, requires_grad=True)
    table, tokens = logits.log_softmax(-1), torch.tensor([0, 6, 3, 3, 1])
    logprobs = table[torch.arange(5), tokens]
    (gradient,) = torch.autograd.grad(logprobs.sum(), logits)
    wanted = gradient.square().sum(-1)
    assert torch.allclose(score_norms(logprobs, table.exp().square().sum(-1)), wanted, atol=1e-12)
    certain = torch.tensor([-1e-9, 0.0])
    assert score_norms(certain, torch.tensor([1 - 1e-7, 1.0])).min() >= 0


def test_gdpo_normalises_each_component_in_its_group_and_the_sum_over_the_step():
    # Group 1: [8, 0, 0, 0] -> 1.5, -.5, -.5, -.5 and [0, 0, .04, .04] -> -k, -k, k, k with k = sqrt(3) / 2.
    # Group 2: equal first scores -> 0, and the same second ones. Sums with the weights 1 and 2:
    k = 3**0.5 / 2
    sums = [1.5 - 2 * k, -0.5 - 2 * k, -0.5 + 2 * k, -0.5 + 2 * k, -2 * k, -2 * k, 2 * k, 2 * k]
    std = (sum(x * x for x in sums) / 7) ** 0.5
    scores = torch.tensor(
        [[[8, 0, 1], [0, 0, 2], [0, 4e-2, 3], [0, 4e-2, 4]], [[5, 0, 5], [5, 0, 6], [5, 1, 7], [5, 1, 8]]],
        dtype=torch.float64,
    )
    shown_only = Components(("right", "short", "metric/x"), scores, torch.tensor([1.0, 2.0, 0.0]))
    assert gdpo(shown_only).flatten().tolist() == pytest.approx([x / std for x in sums], abs=1e-4)
    assert shown_only["short"][0].tolist() == [0, 0, 4e-2, 4e-2]


def test_best_is_shared_by_equal_ones_and_missing_where_all_are_equal():
    rewards = torch.tensor([[0.0, 3.0, 1.0, -1.0], [0.0, 2.0, 2.0, 1.0], [2.0] * 4])
    wanted = [[0, 1, 0, 0], [0, 0.5, 0.5, 0], [0] * 4]
    assert GROUP_ADVANTAGES["best"](rewards, rewards).tolist() == wanted


def test_gdpo_takes_another_formula_for_a_component():
    scores = torch.tensor([[[8.0, 3.0], [0.0, 0.0], [0.0, 0.0], [0.0, 1.0]]], dtype=torch.float64)
    found = gdpo(Components(("right", "long"), scores, torch.tensor([1.0, 1.0])), {"long": "rloo"})
    # [8, 0, 0, 0] -> 1.5, -.5, -.5, -.5; [3, 0, 0, 1] less the others' means 1/3, 4/3, 4/3, 1
    sums = torch.tensor([1.5 + 8 / 3, -0.5 - 4 / 3, -0.5 - 4 / 3, -0.5], dtype=torch.float64)
    assert found[0].tolist() == pytest.approx((sums / sums.std()).tolist(), abs=1e-5)


def test_pass_at_k_has_the_closed_form_for_right_and_wrong():
    # 4 completions, 1 right, k = 2: of 6 pairs 3 hold it, so the mean is 1/2 and the std 1/2. A wrong one
    # is in 3 pairs, one of them with the right one: (1/3 - 1/2) / (1/2).
    found = pass_at_k(torch.tensor([[0.0, 1.0, 0.0, 0.0]]), torch.ones(1, 4), k=2)
    assert found[0].tolist() == pytest.approx([-1 / 3, 1, -1 / 3, -1 / 3], abs=1e-5)
    # 3 right of 4: every pair is right, so the group has nothing to learn; with k = 3 of 5 neither.
    assert pass_at_k(torch.tensor([[0.0, 1.0, 1.0, 1.0]]), torch.ones(1, 4), k=2).tolist() == [[0.0] * 4]
    silent = pass_at_k(torch.full((1, 5), 0.3), torch.ones(1, 5), k=3)
    assert silent.tolist() == [[0.0] * 5]


@pytest.mark.parametrize("k", [1, 2, 3, 6])
def test_pass_at_k_is_the_mean_over_all_subsets(k):
    rewards = [0.2, 0.9, 0.2, -1.0, 0.5, 0.0]
    best = {s: max(rewards[i] for i in s) for s in combinations(range(6), k)}
    mean = sum(best.values()) / len(best)
    std = (sum((b - mean) ** 2 for b in best.values()) / len(best)) ** 0.5
    own = [[b for s, b in best.items() if i in s] for i in range(6)]
    found = pass_at_k(torch.tensor([rewards], dtype=torch.float64), torch.ones(1, 6), k)
    wanted = [(sum(x) / len(x) - mean) / (std + 1e-6) for x in own]
    assert found[0].tolist() == pytest.approx(wanted, abs=1e-9)


def test_gdpo_keeps_apart_what_has_the_same_sum_and_gives_silent_groups_zeros():
    """Right but long, and wrong but short, have the sum 1."""
    scores = torch.tensor([[[1.0, 0.0], [0.0, 1.0], [0.0, 0.0]], [[0.1, 0.1], [0.1, 0.1], [0.1, 0.1]]])
    found = gdpo(Components(("right", "short"), scores, torch.tensor([3.0, 1.0])))
    assert found[0, 0] > found[0, 1] > found[0, 2]
    assert found[1].tolist() == [0.0] * 3
    assert found.std() == pytest.approx(1, rel=1e-5)


def test_reinforce_plus_plus_baseline_whitens_over_all_groups():
    # One token each: centred 1, -1 and 3, -3; mean 0, variance (1 + 1 + 9 + 9) / 3 = 20 / 3.
    std = (20 / 3) ** 0.5
    got = advantages_of("reinforce++-baseline", [[2.0, 0.0], [6.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert [x for row in got for x in row] == pytest.approx([1 / std, -1 / std, 3 / std, -3 / std])


def test_a_tiny_spread_and_a_tiny_mean_are_damped():
    """The sum of standard deviation (or mean) and 1e-6 is divided by."""
    rewards, lengths = torch.tensor([[0.0, 2e-6]], dtype=torch.float64), torch.ones(1, 2)
    scale = 1 / (math.sqrt(2) + 1)
    assert GROUP_ADVANTAGES["grpo"](rewards, lengths)[0].tolist() == pytest.approx([-scale, scale])
    assert GROUP_ADVANTAGES["maxrl"](rewards, lengths)[0].tolist() == pytest.approx([-0.5, 0.5])


def test_groups_without_a_signal():
    rewards = torch.tensor([[0.1, 0.1, 0.1], [0.1, 0.1, 0.2]])
    assert zero_std_groups(rewards).tolist() == [True, False]


def test_token_returns():
    # a reward at the end with gamma 0.5; then a reward at every token: 1 + 2 + 3, 2 + 3, 3
    assert token_returns(torch.tensor([0.0, 0.0, 4.0]), gamma=0.5).tolist() == [1, 2, 4]
    assert token_returns(torch.tensor([1.0, 2.0, 3.0]), gamma=1.0).tolist() == [6, 5, 3]


def looped_returns(rewards: torch.Tensor, gamma: float) -> torch.Tensor:
    returns = rewards.clone()
    for t in range(len(returns) - 2, -1, -1):
        returns[t] += gamma * returns[t + 1]
    return returns


@pytest.mark.parametrize("length", [1, 2, 3, 64, 513])
@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_returns_and_gae_of_padded_rows_equal_a_loop_over_tokens(length, gamma, lam):
    torch.manual_seed(0)
    rewards, values = torch.randn(5, length), torch.randn(5, length)
    lengths = torch.randint(1, length + 1, (5,))
    padding = torch.arange(length) >= lengths[:, None]
    rewards, values = rewards.masked_fill(padding, 0.0), values.masked_fill(padding, 0.0)
    returns, advantages = token_returns(rewards, gamma), gae(rewards, values, gamma, lam)
    for row, kept in enumerate(lengths.tolist()):
        r, v = rewards[row, :kept].double(), values[row, :kept].double()
        deltas = r + gamma * torch.cat([v[1:], v.new_zeros(1)]) - v
        torch.testing.assert_close(
            returns[row, :kept].double(), looped_returns(r, gamma), atol=1e-6, rtol=1e-6
        )
        torch.testing.assert_close(
            advantages[row, :kept].double(), looped_returns(deltas, gamma * lam), atol=1e-6, rtol=1e-6
        )
    assert not returns.masked_select(padding).any()
    assert not advantages.masked_select(padding).any()


class Operations(TorchDispatchMode):
    """Counts torch's operations."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += 1
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize(
    "returns",
    [lambda x: token_returns(x, 0.99), lambda x: gae(x, x, 0.99, 0.95)],
    ids=["token_returns", "gae"],
)
def test_operations_of_the_returns_grow_with_the_logarithm_of_the_tokens(returns: Callable[..., Any]):
    """Twice the tokens, the same few operations more. Meta tensors have no values for a loop in Python."""
    counts = []
    for length in (64, 128, 256, 512, 1024):
        with Operations() as operations:
            returns(torch.zeros(4, length, device="meta"))
        counts.append(operations.count)
    added = {b - a for a, b in pairwise(counts)}
    assert len(added) == 1, counts
    assert max(added) <= 8, counts


def test_whitening_uses_moments_summed_over_ranks():
    # 1, 3 on this rank and 5, 7 on the other: mean 4, variance (9 + 1 + 1 + 9) / 3 = 20 / 3
    here, there = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])
    sums = moments(here) + moments(there)
    assert sums.tolist() == [4, 16, 84]
    assert whiten(here, sums).tolist() == pytest.approx([-3 / (20 / 3) ** 0.5, -1 / (20 / 3) ** 0.5])
    assert whiten(there, sums).tolist() == pytest.approx([1 / (20 / 3) ** 0.5, 3 / (20 / 3) ** 0.5])


def test_whitening_small_values():
    # 0.1, 0.3: mean 0.2, variance (0.01 + 0.01) / 1
    values = torch.tensor([0.1, 0.3], dtype=torch.float64)
    assert whiten(values, moments(values)).tolist() == pytest.approx([-0.1 / 0.02**0.5, 0.1 / 0.02**0.5])


def test_whitening_a_constant_gives_zeros():
    assert whiten(torch.tensor([2.0, 2.0]), moments(torch.tensor([2.0, 2.0]))).tolist() == [0, 0]
    assert whiten(torch.tensor([2.0]), moments(torch.tensor([2.0]))).tolist() == [0]
    large = torch.full((3,), 908204.772, dtype=torch.float64)  # its variance rounds to -1.2e-4
    assert whiten(large, moments(large)).tolist() == [0, 0, 0]


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        # delta: 0 + 4 / 2 - 2 = 0, 0 + 6 / 2 - 4 = -1, 8 - 6 = 2; A: 2, -1 + 2 / 4 = -0.5, 0 - 0.5 / 4
        (0.5, 0.5, [-0.125, -0.5, 2.0]),
        (0.5, 0.0, [0.0, -1.0, 2.0]),  # only the deltas
        (1.0, 1.0, [6.0, 4.0, 2.0]),  # the full return 8 minus the value
    ],
)
def test_gae(gamma, lam, expected):
    assert gae(
        torch.tensor([0.0, 0.0, 8.0]), torch.tensor([2.0, 4.0, 6.0]), gamma, lam
    ).tolist() == pytest.approx(expected)


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (130, -1)]
)
def test_overlong_penalty(length, penalty):
    # the last 20 of 100 tokens
    assert overlong_penalty(length, 100, 0.2) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 0.0) == 0
