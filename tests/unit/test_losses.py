"""Policy losses, value loss, KL estimators and aggregations against values computed by hand."""

import math
from typing import Any

import pytest
import torch

from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    BatchSize,
    LossInputs,
    is_clipped,
    value_loss,
)
from skylite.config.algorithm import AlgorithmConfig

LOG2, LOG3, LOG4 = math.log(2), math.log(3), math.log(4)


def losses_of(
    name: str, policy: list[float], old: list[float], advantages: list[float], **more: Any
) -> tuple[list[float], list[float]]:
    """Loss of each token, and gradient of their sum by each policy logprob. Default: one sequence."""
    sequences, selected = more.pop("sequences", [0] * len(policy)), more.pop("selected", None)
    leaf = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    x = LossInputs(
        policy_logprobs=leaf,
        old_logprobs=torch.tensor(old, dtype=torch.float64),
        sampling_logprobs=torch.tensor(old, dtype=torch.float64),
        advantages=torch.tensor(advantages, dtype=torch.float64),
        segments=torch.tensor(sequences),
        num_segments=max(sequences) + 1,
        selected=None if selected is None else torch.tensor(selected),
    )
    loss = POLICY_LOSSES[name](x, AlgorithmConfig(policy_loss=name, **more))
    (slopes,) = torch.autograd.grad(loss.sum(), leaf)
    return loss.tolist(), slopes.tolist()


@pytest.mark.parametrize(
    ("name", "ratio", "advantage", "settings", "loss", "slope"),
    [
        ("clip", 1.1, 2, {}, -2.2, -2.2),
        ("clip", 2, 2, {}, -2.4, 0),  # 1.2 * 2
        ("clip", 2, 2, {"clip_eps_high": 0.5}, -3, 0),  # 1.5 * 2
        ("clip", 2, -2, {}, 4, 4),
        ("clip", 0.25, -2, {"clip_eps_low": 0.5}, 1, 0),  # 0.5 * 2
        ("dual_clip", 2, -2, {}, 4, 4),  # below 3 * 2: same as clip
        ("dual_clip", 4, -2, {}, 6, 0),  # at most 3 * 2
        ("dual_clip", 4, -2, {"dual_clip": 3.5}, 7, 0),
        ("dual_clip", 4, 2, {}, -2.4, 0),  # a good token: same as clip
        ("dual_clip", 4, 0.5, {}, -0.6, 0),
        ("dual_clip", 4, -0.5, {}, 1.5, 0),
        ("gspo", 1.1, 2, {}, -2.2, -2.2),
        ("gspo", 2, 2, {}, -2.4, 0),
        ("sapo", 1, 3, {}, -6, -3),  # the gate is 1/2 * 4 and its slope 1/4 * 4
        ("sapo", 1, -2, {"sapo_tau_neg": 2.0}, 2, 2),  # 1/2 * 4/2 * 2; the slope has no tau
        ("sapo", 1 + LOG3, 1, {}, -3, -0.75 * (1 + LOG3)),  # sigmoid(log 3) = 3/4, its slope 3/16
        ("sapo", 1 + LOG3, -1, {"sapo_tau_neg": 1.0}, 3, 0.75 * (1 + LOG3)),
        ("sapo", 1, -0.5, {"sapo_tau_neg": 2.0}, 0.5, 0.5),
        ("sapo", 2, 0, {}, 0, 0),
        # the sampler's probability is 1 / e = 0.368
        ("dppo", 1.1, 2, {}, -2.2, -2.2),  # 0.037 more
        ("dppo", 2, 2, {}, 0, 0),  # 0.368 more: outside
        ("dppo", 2, 2, {"clip_eps_high": 0.4}, -4, -4),
        ("dppo", 2, -2, {}, 4, 4),
        ("dppo", 0.25, -2, {}, 0, 0),  # 0.276 less: outside
        ("dppo", 0.25, -2, {"clip_eps_low": 0.3}, 0.5, 0.5),
        ("dppo", 2, 2, {"dppo_penalty": 0.5}, 0.5 * LOG2**2, LOG2),
        ("dppo_kl", 2, 2, {}, 0, 0),  # 0.368 log(1/2) + 0.632 log(0.632 / 0.264) = 0.296: outside
        ("dppo_kl", 2, 2, {"clip_eps_high": 0.3}, -4, -4),
        ("dppo_kl", 2, -2, {}, 4, 4),
        ("dppo_kl", 0.25, -2, {"clip_eps_low": 0.27}, 0, 0),  # 0.510 + 0.632 log(0.632 / 0.908) = 0.281
        ("dppo_kl", 0.25, -2, {"clip_eps_low": 0.29}, 0.5, 0.5),
        ("cross_entropy", 2, 3, {}, 3 * (1 - LOG2), -3),
        ("dro", 2, 3, {"dro_beta": 0.5}, 3 * (1 - LOG2) + LOG2**2 / 4, -3 + LOG2 / 2),
        ("dro", 2, 0, {"dro_beta": 0.5}, LOG2**2 / 4, LOG2 / 2),
    ],
)
def test_loss_of_one_token(name, ratio, advantage, settings, loss, slope):
    got = losses_of(name, [math.log(ratio) - 1], [-1.0], [float(advantage)], **settings)
    assert (got[0][0], got[1][0]) == pytest.approx((loss, slope), abs=1e-12)


@pytest.mark.parametrize(
    ("eps_high", "advantage", "loss", "slope"),
    [
        (3.0, 1.0, -2.0, -2.0),  # slope: a token moves two tokens' losses by half each
        (0.25, 1.0, -1.25, 0.0),  # clipped
        (0.25, -1.0, 2.0, 2.0),  # bad and more likely: not clipped
    ],
)
def test_gspo_has_one_ratio_per_completion(eps_high, advantage, loss, slope):
    # Log ratios log 4 and 0: mean log 2. The other completion has ratio 1/2, clipped at 0.8 if bad.
    policy, old = [LOG4 - 1, -1.0, -LOG2 - 2], [-1.0, -1.0, -2.0]
    got = losses_of(
        "gspo", policy, old, [advantage, advantage, 1.0], sequences=[0, 0, 1], clip_eps_high=eps_high
    )
    assert got[0] == pytest.approx([loss, loss, -0.5])
    assert got[1] == pytest.approx([slope, slope, -0.5])


@pytest.mark.parametrize(
    ("advantage", "loss", "slopes"),
    [
        (1.0, -math.exp(0.2), [0.0, -math.exp(0.2)]),  # log 4 is clipped at 0.4: the mean is 0.2
        (-1.0, 2.0, [2.0, 2.0]),  # not clipped: the mean is log 2
    ],
)
def test_gmpo_is_the_geometric_mean_of_clipped_ratios(advantage, loss, slopes):
    got = losses_of(
        "gmpo", [LOG4 - 1, -1.0], [-1.0, -1.0], [advantage] * 2, clip_eps_low=0.4, clip_eps_high=0.4
    )
    assert got[0] == pytest.approx([loss, loss])
    assert got[1] == pytest.approx(slopes)


@pytest.mark.parametrize(("advantage", "weight"), [(1.0, 4 * math.exp(-3)), (-1.0, 8 * math.exp(-2))])
def test_vespo_weighs_a_completion_by_its_ratio(advantage, weight):
    # ratios 4 and 1/2 make 2: 2^2 exp(3 (1 - 2)), or 2^3 exp(2 (1 - 2)); the other completion's is 1
    policy, old = [LOG4 - 1, -LOG2 - 1, -3.0], [-1.0, -1.0, -3.0]
    got = losses_of("vespo", policy, old, [advantage, advantage, 1.0], sequences=[0, 0, 1])
    assert got[0] == pytest.approx([-weight * advantage * policy[0], -weight * advantage * policy[1], 3.0])
    assert got[1] == pytest.approx([-weight * advantage, -weight * advantage, -1.0])
    far = losses_of("vespo", [800.0, 800.0], [-1.0, 1200.0], [1.0, 1.0], sequences=[0, 1])
    assert far == ([0.0, 0.0], [0.0, 0.0]), "neither overflow nor nan"


@pytest.mark.parametrize(
    ("ratio", "settings", "weight"),
    [(6, {}, 5), (6, {"clip_eps_high": 1.0}, 2), (0.5, {}, 0.5), (0.5, {"clip_eps_low": 0.25}, 0.75)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, settings, weight):
    # -weight * 2 * -3, and its slope -weight * 2
    bounds = {"clip_eps_low": 1.0, "clip_eps_high": 4.0, **settings}
    loss, slope = losses_of("cispo", [-3.0], [-3.0 - math.log(ratio)], [2.0], **bounds)
    assert (loss[0], slope[0]) == pytest.approx((6 * weight, -2 * weight))


def test_clip_cov_drops_the_chosen_tokens_and_clips_the_others():
    # ratios 1, 1 and 2
    got = losses_of(
        "clip_cov", [-1.0, -1.0, LOG2 - 1], [-1.0] * 3, [5.0, 3.0, 1.0], selected=[True, False, False]
    )
    assert got[0] == pytest.approx([0, -3, -1.2])
    assert got[1] == pytest.approx([0, -3, 0])


def test_kl_cov_penalises_the_chosen_tokens_and_clips_none():
    # ratio 2, A 3: -6; ratio 1/2: -1.5. Chosen: plus log 2 / 2, and a slope of 1/2 to the old policy.
    policy, old = [LOG2 - 1, LOG2 - 1, -LOG2 - 1], [-1.0] * 3
    got = losses_of("kl_cov", policy, old, [3.0] * 3, selected=[False, True, True], kl_cov_coef=0.5)
    assert got[0] == pytest.approx([-6, -6 + LOG2 / 2, -1.5 + LOG2 / 2])
    assert got[1] == pytest.approx([-6, -5.5, -2])


def test_clipped_tokens_are_out_of_bounds_in_the_direction_of_their_advantage():
    ratios, advantages = (
        torch.tensor([2.0, 2.0, 0.5, 0.5, 1.1, 2.0, 1.1]),
        torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0, 2.0]),
    )
    x = LossInputs(
        policy_logprobs=ratios.log(),
        old_logprobs=torch.zeros(7),
        advantages=advantages,
        segments=torch.zeros(7).long(),
        num_segments=1,
    )
    assert is_clipped(x, AlgorithmConfig()).tolist() == [True, False, False, True, False, False, False]


def test_gspo_clips_completions():
    # ratios 4 and 1/4 are out of bounds, but their completion's is 1; the other completion's is 2
    x = LossInputs(
        policy_logprobs=torch.tensor([LOG4, -LOG4, LOG2]),
        old_logprobs=torch.zeros(3),
        advantages=torch.ones(3),
        segments=torch.tensor([0, 0, 1]),
        num_segments=2,
    )
    assert is_clipped(x, AlgorithmConfig(name="gspo")).tolist() == [False, False, True]
    assert is_clipped(x, AlgorithmConfig()).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (5.0, 9.0, 18.0, 0.0),  # clipped at 2 + 1: (3 - 9)^2 / 2 > (5 - 9)^2 / 2
        (5.0, 1.0, 8.0, 4.0),  # (5 - 1)^2 / 2 > (3 - 1)^2 / 2
        (2.5, 1.0, 1.125, 1.5),  # not clipped
    ],
)
def test_value_loss_is_the_larger_of_clipped_and_unclipped(value, target, loss, slope):
    values = torch.tensor([value], requires_grad=True)
    got = value_loss(values, torch.tensor([2.0]), torch.tensor([target]), clip_range=1.0)
    (slopes,) = torch.autograd.grad(got.sum(), values)
    assert (got.item(), slopes.item()) == (loss, slope)


@pytest.mark.parametrize(
    ("name", "likelier", "rarer", "slopes"),
    [
        ("k1", LOG2, -LOG2, (1, 1)),
        ("k2", LOG2**2 / 2, LOG2**2 / 2, (LOG2, -LOG2)),
        ("k3", 0.5 + LOG2 - 1, 2 - LOG2 - 1, (0.5, -1)),  # 1 - ref / policy
    ],
)
def test_kl_estimators(name, likelier, rarer, slopes):
    # the policy is twice as likely as the reference, half as likely, and equally likely
    policy = torch.tensor([LOG2 - 3, -LOG2 - 3, -3.0], dtype=torch.float64, requires_grad=True)
    kl = KL_ESTIMATORS[name](policy, torch.full((3,), -3.0, dtype=torch.float64))
    (slope,) = torch.autograd.grad(kl.sum(), policy)
    assert kl.tolist() == pytest.approx([likelier, rarer, 0])
    assert slope[:2].tolist() == pytest.approx(slopes)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("token-mean", 3.0),  # 12 / 4
        ("seq-mean-token-sum", 6.0),  # (6 + 6) / 2
        ("seq-mean-token-mean", 4.0),  # (2 + 6) / 2
        ("fixed-length", 0.75),  # 12 / (2 * 8)
    ],
)
def test_aggregations(name, expected):
    # completions with losses 1, 2, 3 and 6, with at most 8 tokens
    size = BatchSize(num_tokens=4, num_trajectories=2, max_completion_tokens=8)
    assert 6 * AGGREGATIONS[name](3, size) + 6 * AGGREGATIONS[name](1, size) == pytest.approx(expected)
    nothing, one = BatchSize(0, 0, 8), BatchSize(1, 1, 8)
    assert AGGREGATIONS[name](4, nothing) == AGGREGATIONS[name](4, one) > 0  # no division by zero
