"""Every advantage, loss, KL estimator, aggregation, weight and choice of tokens against numbers worked out by hand; and the presets."""

import math
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from skylite.algorithms.advantages import GROUP_ADVANTAGES, gae, moments, token_returns, whiten
from skylite.algorithms.importance import importance_weights
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
    BatchSize,
    LossInputs,
    is_clipped,
    value_loss,
)
from skylite.algorithms.token_selection import (
    clip_cov_selection,
    covariances,
    entropy_threshold,
    kl_cov_selection,
)
from skylite.config.algorithm import PRESETS, AlgorithmConfig, ImportanceConfig
from skylite.orchestrator.sampling import overlong_penalty

LOG2, LOG3, LOG4 = math.log(2), math.log(3), math.log(4)

# Rewards 8, 0, 0, 0 of completions of 1, 1, 2 and 4 tokens: mean 2, sample variance (36 + 4 + 4 + 4) / 3 = 16.
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


def test_every_group_advantage_is_worked_out_above():
    assert set(GROUP_ADVANTAGES) == {"grpo", "dr_grpo", "rloo", "maxrl", "opo", "reinforce++-baseline"}


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "maxrl", "opo"])
def test_a_group_does_not_see_the_others_and_equal_rewards_give_zeros(name):
    alone = advantages_of(name, [REWARDS], [LENGTHS])[0]
    # 0.1 seven times has a mean that is not 0.1 in floating point
    both = advantages_of(
        name, [REWARDS * 2, [0.1] * 8, [0.0] * 8], [LENGTHS * 2, [1.0, 2, 3, 4, 5, 6, 7, 8], [1.0] * 8]
    )
    assert both[1] == both[2] == [0.0] * 8
    assert advantages_of(name, [REWARDS, [1.0, 0, 1, 0]], [LENGTHS, LENGTHS])[0] == alone


def test_reinforce_plus_plus_baseline_whitens_over_all_groups():
    # One token each: centred 1, -1 and 3, -3; mean 0, variance (1 + 1 + 9 + 9) / 3 = 20 / 3.
    std = (20 / 3) ** 0.5
    got = advantages_of("reinforce++-baseline", [[2.0, 0.0], [6.0, 0.0]], [[1.0, 1.0], [1.0, 1.0]])
    assert [x for row in got for x in row] == pytest.approx([1 / std, -1 / std, 3 / std, -3 / std])


def test_token_returns():
    # the reward at the end, halved a token; then rewards everywhere: 1 + 2 + 3, 2 + 3, 3
    assert token_returns(torch.tensor([0.0, 0.0, 4.0]), gamma=0.5).tolist() == [1, 2, 4]
    assert token_returns(torch.tensor([1.0, 2.0, 3.0]), gamma=1.0).tolist() == [6, 5, 3]


def test_returns_are_whitened_by_moments_that_are_added_over_ranks():
    # 1, 3 here and 5, 7 there: mean 4, variance (9 + 1 + 1 + 9) / 3 = 20 / 3
    here, there = torch.tensor([1.0, 3.0]), torch.tensor([5.0, 7.0])
    sums = moments(here) + moments(there)
    assert sums.tolist() == [4, 16, 84]
    assert whiten(here, sums).tolist() == pytest.approx([-3 / (20 / 3) ** 0.5, -1 / (20 / 3) ** 0.5])
    assert whiten(there, sums).tolist() == pytest.approx([1 / (20 / 3) ** 0.5, 3 / (20 / 3) ** 0.5])


def test_whitening_a_constant_gives_zeros():
    assert whiten(torch.tensor([2.0, 2.0]), moments(torch.tensor([2.0, 2.0]))).tolist() == [0, 0]
    assert whiten(torch.tensor([2.0]), moments(torch.tensor([2.0]))).tolist() == [0]


@pytest.mark.parametrize(
    ("gamma", "lam", "expected"),
    [
        # delta: 0 + 4 / 2 - 2 = 0, 0 + 6 / 2 - 4 = -1, 8 - 6 = 2; A: 2, -1 + 2 / 4 = -0.5, 0 - 0.5 / 4
        (0.5, 0.5, [-0.125, -0.5, 2.0]),
        (0.5, 0.0, [0.0, -1.0, 2.0]),  # the deltas alone
        (1.0, 1.0, [6.0, 4.0, 2.0]),  # the whole return 8 minus the value
    ],
)
def test_gae(gamma, lam, expected):
    assert gae(
        torch.tensor([0.0, 0.0, 8.0]), torch.tensor([2.0, 4.0, 6.0]), gamma, lam
    ).tolist() == pytest.approx(expected)


def losses_of(
    name: str, policy: list[float], old: list[float], advantages: list[float], **more: Any
) -> tuple[list[float], list[float]]:
    """Loss of each token and the slope of their sum by each policy logprob. One sequence, unless `sequences` says otherwise."""
    sequences, selected = more.pop("sequences", [0] * len(policy)), more.pop("selected", None)
    leaf = torch.tensor(policy, dtype=torch.float64, requires_grad=True)
    x = LossInputs(
        policy_logprobs=leaf,
        old_logprobs=torch.tensor(old, dtype=torch.float64),
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
        ("dual_clip", 2, -2, {}, 4, 4),  # under 3 * 2: as clip
        ("dual_clip", 4, -2, {}, 6, 0),  # at most 3 * 2
        ("dual_clip", 4, -2, {"dual_clip": 3.5}, 7, 0),
        ("dual_clip", 4, 2, {}, -2.4, 0),  # a good token: as clip
        ("sapo", 1, 3, {}, -6, -3),  # the gate is 1/2 * 4 and its slope 1/4 * 4
        ("sapo", 1, -2, {"sapo_tau_neg": 2.0}, 2, 2),  # 1/2 * 4/2 * 2; the slope has no tau
        ("sapo", 1 + LOG3, 1, {}, -3, -0.75 * (1 + LOG3)),  # sigmoid(log 3) = 3/4, its slope 3/16
        ("sapo", 1 + LOG3, -1, {"sapo_tau_neg": 1.0}, 3, 0.75 * (1 + LOG3)),
        ("sapo", 2, 0, {}, 0, 0),
    ],
)
def test_loss_of_one_token(name, ratio, advantage, settings, loss, slope):
    got = losses_of(name, [math.log(ratio) - 1], [-1.0], [float(advantage)], **settings)
    assert (got[0][0], got[1][0]) == pytest.approx((loss, slope), abs=1e-12)


@pytest.mark.parametrize(
    ("eps_high", "advantage", "loss", "slope"),
    [
        (3.0, 1.0, -2.0, -2.0),  # the slope: two tokens' losses, each moved by half of what a token moves
        (0.25, 1.0, -1.25, 0.0),  # clipped
        (0.25, -1.0, 2.0, 2.0),  # bad and likelier: not clipped
    ],
)
def test_gspo_has_one_ratio_a_completion(eps_high, advantage, loss, slope):
    # log ratios log 4 and 0: their mean is log 2. The other completion has the ratio 1/2 and is clipped at 0.8 where it is bad.
    policy, old = [LOG4 - 1, -1.0, -LOG2 - 2], [-1.0, -1.0, -2.0]
    got = losses_of(
        "gspo", policy, old, [advantage, advantage, 1.0], sequences=[0, 0, 1], clip_eps_high=eps_high
    )
    assert got[0] == pytest.approx([loss, loss, -0.5])
    assert got[1] == pytest.approx([slope, slope, -0.5])


@pytest.mark.parametrize(
    ("ratio", "settings", "weight"),
    [(6, {}, 5), (6, {"clip_eps_high": 1.0}, 2), (0.5, {}, 0.5), (0.5, {"clip_eps_low": 0.25}, 0.75)],
)
def test_cispo_clips_the_weight_and_keeps_the_gradient(ratio, settings, weight):
    # -weight * 2 * -3, and its slope -weight * 2
    bounds = {"clip_eps_low": 1.0, "clip_eps_high": 4.0, **settings}
    loss, slope = losses_of("cispo", [-3.0], [-3.0 - math.log(ratio)], [2.0], **bounds)
    assert (loss[0], slope[0]) == pytest.approx((6 * weight, -2 * weight))


def test_clip_cov_takes_the_chosen_tokens_out_and_clips_the_others():
    # ratios 1, 1 and 2
    got = losses_of(
        "clip_cov", [-1.0, -1.0, LOG2 - 1], [-1.0] * 3, [5.0, 3.0, 1.0], selected=[True, False, False]
    )
    assert got[0] == pytest.approx([0, -3, -1.2])
    assert got[1] == pytest.approx([0, -3, 0])


def test_kl_cov_pulls_the_chosen_tokens_back_and_clips_none():
    # ratio 2, A 3: -6; ratio 1/2: -1.5. Chosen: log 2 / 2 more, and a slope of 1/2 towards the old policy.
    policy, old = [LOG2 - 1, LOG2 - 1, -LOG2 - 1], [-1.0] * 3
    got = losses_of("kl_cov", policy, old, [3.0] * 3, selected=[False, True, True], kl_cov_coef=0.5)
    assert got[0] == pytest.approx([-6, -6 + LOG2 / 2, -1.5 + LOG2 / 2])
    assert got[1] == pytest.approx([-6, -5.5, -2])


def test_every_policy_loss_is_worked_out_above():
    assert set(POLICY_LOSSES) == {"clip", "dual_clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov"}


def test_clipped_tokens_are_those_out_of_bounds_in_the_direction_of_their_advantage():
    ratios, advantages = (
        torch.tensor([2.0, 2.0, 0.5, 0.5, 1.1, 2.0]),
        torch.tensor([1.0, -1.0, 1.0, -1.0, 1.0, 0.0]),
    )
    x = LossInputs(
        policy_logprobs=ratios.log(),
        old_logprobs=torch.zeros(6),
        advantages=advantages,
        segments=torch.zeros(6).long(),
        num_segments=1,
    )
    assert is_clipped(x, AlgorithmConfig()).tolist() == [True, False, False, True, False, False]


def test_what_gspo_clips_is_a_completion():
    # ratios 4 and 1/4: each is out of bounds, their completion's is 1; the other completion's is 2
    x = LossInputs(
        policy_logprobs=torch.tensor([LOG4, -LOG4, LOG2]), old_logprobs=torch.zeros(3), advantages=torch.ones(3),
        segments=torch.tensor([0, 0, 1]), num_segments=2,
    )  # fmt: skip
    assert is_clipped(x, AlgorithmConfig(name="gspo")).tolist() == [False, False, True]
    assert is_clipped(x, AlgorithmConfig()).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("value", "target", "loss", "slope"),
    [
        (5.0, 9.0, 18.0, 0.0),  # kept within 2 + 1: (3 - 9)^2 / 2, worse than (5 - 9)^2 / 2
        (5.0, 1.0, 8.0, 4.0),  # (5 - 1)^2 / 2, worse than (3 - 1)^2 / 2
        (2.5, 1.0, 1.125, 1.5),  # not clipped
    ],
)
def test_value_loss_is_the_worse_of_clipped_and_not(value, target, loss, slope):
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
    # the policy twice and half as likely as the reference, and equal
    policy = torch.tensor([LOG2 - 3, -LOG2 - 3, -3.0], dtype=torch.float64, requires_grad=True)
    kl = KL_ESTIMATORS[name](policy, torch.full((3,), -3.0, dtype=torch.float64))
    (slope,) = torch.autograd.grad(kl.sum(), policy)
    assert kl.tolist() == pytest.approx([likelier, rarer, 0])
    assert slope[:2].tolist() == pytest.approx(slopes)
    assert set(KL_ESTIMATORS) == {"k1", "k2", "k3"}


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
    # completions of losses 1, 2, 3 and of 6, of at most 8 tokens
    size = BatchSize(num_tokens=4, num_trajectories=2, max_completion_tokens=8)
    assert 6 * AGGREGATIONS[name](3, size) + 6 * AGGREGATIONS[name](1, size) == pytest.approx(expected)
    assert AGGREGATIONS[name](3, BatchSize(0, 0, 8)) > 0  # nothing counted: nothing is divided by zero
    assert set(AGGREGATIONS) == {"token-mean", "seq-mean-token-sum", "seq-mean-token-mean", "fixed-length"}


def weights_of(**settings: object) -> tuple[list[float], dict[str, float]]:
    """A completion with the ratios 4 and 1/2, and one with 1/4."""
    old = torch.tensor([LOG4, -LOG2, -LOG4], dtype=torch.float64) - 9
    rollout = torch.full((3,), -9.0, dtype=torch.float64)
    weights, sums = importance_weights(
        old.requires_grad_(), rollout, torch.tensor([0, 0, 1]), 2, ImportanceConfig(**settings)
    )
    assert not weights.requires_grad
    assert not any(s.requires_grad for s in sums.values())
    return weights.tolist(), {name: float(s) for name, s in sums.items()}


@pytest.mark.parametrize(
    ("settings", "weights", "num_changed"),
    [
        ({}, [2, 0.5, 0.25], 1),
        ({"cap": 3.0}, [3, 0.5, 0.25], 1),
        ({"mode": "mask"}, [0, 0.5, 0.25], 1),
        ({"mode": "mask", "floor": 0.3}, [0, 0.5, 0], 2),
        ({"mode": "mask", "cap": 4.5, "floor": 0.3}, [4, 0.5, 0], 1),
        ({"mode": "none"}, [1, 1, 1], 0),
        # the product of the first completion is 4 / 2
        ({"level": "sequence", "cap": 3.0}, [2, 2, 0.25], 0),
        ({"level": "sequence", "cap": 1.5}, [1.5, 1.5, 0.25], 2),
        ({"level": "sequence", "mode": "mask", "cap": 1.5}, [0, 0, 0.25], 2),
        ({"level": "sequence", "mode": "mask", "cap": 3.0, "floor": 0.5}, [2, 2, 0], 1),
        ({"level": "sequence", "mode": "none"}, [1, 1, 1], 0),
    ],
)
def test_importance_weights(settings, weights, num_changed):
    got, sums = weights_of(**settings)
    assert got == pytest.approx(weights)
    assert sums["mismatch/importance_changed_frac"] == num_changed


@pytest.mark.parametrize(
    ("limit", "weights", "num_rejected"),
    [(0.95, [2, 0.5, 0.25], 0), (0.8, [0, 0, 0.25], 2), (0.5, [0, 0, 0], 3)],
)
def test_completions_far_from_the_sampler_are_rejected_whole(limit, weights, num_rejected):
    # k3: 4 - log 4 - 1 = 1.614 and 1/2 + log 2 - 1 = 0.193, on average 0.903; 1/4 + log 4 - 1 = 0.636
    got, sums = weights_of(reject_kl=limit)
    assert got == pytest.approx(weights)
    assert sums["mismatch/rejected_frac"] == num_rejected


def test_mismatch_is_reported_whatever_the_weights_do():
    for mode in ("truncate", "mask", "none"):
        _, sums = weights_of(mode=mode)
        # 1.614 + 0.193 + 0.636 of above; ratios 4 + 1/2 + 1/4 and 16 + 1/4 + 1/16
        assert sums["mismatch/kl"] == pytest.approx(1.75 + LOG2)
        assert (sums["ess/weights"], sums["ess/squares"]) == pytest.approx((4.75, 16.3125))
    _, sums = weights_of(level="sequence")
    assert (sums["ess/weights"], sums["ess/squares"]) == pytest.approx(
        (4.25, 8.0625)
    )  # 2 + 2 + 1/4 and 4 + 4 + 1/16


@pytest.mark.parametrize(
    ("length", "penalty"), [(1, 0), (80, 0), (81, -0.05), (90, -0.5), (100, -1), (130, -1)]
)
def test_overlong_penalty(length, penalty):
    # the last 20 of 100 tokens
    assert overlong_penalty(length, 100, 0.2) == pytest.approx(penalty)
    assert overlong_penalty(length, 100, 0.0) == 0


def test_covariances():
    # advantages around their mean 1: 2, 0, -2; logprobs around -2: 1, 0, -1
    assert covariances(torch.tensor([3.0, 1.0, -1.0]), torch.tensor([-1.0, -2.0, -3.0])).tolist() == [2, 0, 2]


def test_clip_cov_draws_among_tokens_within_the_bounds_that_are_not_clipped_anyway():
    cov = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0, 0.0, 9.0, -2.0])
    clipped = torch.tensor([False, False, True, False, False, False, False, False])

    def chosen(frac: float, seed: int = 0, low: float = 1.0) -> list[int]:
        picked = clip_cov_selection(cov, clipped, frac, low, 5.0, torch.Generator().manual_seed(seed))
        return picked.nonzero().flatten().tolist()

    assert chosen(1.0) == chosen(0.25) == [1, 3]  # 2 of 8
    assert {tuple(chosen(0.0002, seed)) for seed in range(20)} == {(1,), (3,)}  # at least one, by the dice
    assert chosen(0.0002, 7) == chosen(0.0002, 7)
    assert chosen(1.0, low=4.5) == []


def test_kl_cov_takes_the_highest_and_of_equals_the_first():
    cov = torch.tensor([1.0, 9.0, 3.0, 9.0])
    assert kl_cov_selection(cov, 0.5).tolist() == [False, True, False, True]
    assert kl_cov_selection(cov, 0.25).tolist() == [False, True, False, False]
    assert kl_cov_selection(cov, 0.0002).tolist() == [False, True, False, False]
    assert kl_cov_selection(cov, 1.0).all()


def test_entropy_threshold_lets_the_share_of_highest_entropy_through():
    entropies = torch.tensor([4.0, 0.0, 2.0, 1.0, 3.0])
    assert entropy_threshold(entropies, 0.25) == 3.0  # three quarters of the way from 0 to 4
    assert entropy_threshold(entropies, 0.375) == 2.5
    assert entropy_threshold(entropies, 1.0) == 0.0


DEFAULTS = AlgorithmConfig().model_dump()


@pytest.mark.parametrize(
    ("name", "row"),
    [
        ("grpo", {}),
        ("bnpo", {}),
        ("dr_grpo", {"advantage": "dr_grpo", "aggregation": "fixed-length"}),
        ("dapo", {"clip_eps_high": 0.28, "zero_std_groups": "resample", "overlong_buffer_frac": 0.2}),
        (
            "gspo",
            {
                "policy_loss": "gspo",
                "aggregation": "seq-mean-token-mean",
                "clip_eps_low": 3e-4,
                "clip_eps_high": 4e-4,
            },
        ),
        ("cispo", {"policy_loss": "cispo", "clip_eps_low": 1.0, "clip_eps_high": 4.0}),
        ("sapo", {"policy_loss": "sapo", "aggregation": "seq-mean-token-mean"}),
        ("rloo", {"advantage": "rloo", "aggregation": "seq-mean-token-sum"}),
        ("reinforce++", {"advantage": "reinforce++"}),
        ("reinforce++-baseline", {"advantage": "reinforce++-baseline"}),
        ("maxrl", {"advantage": "maxrl"}),
        ("opo", {"advantage": "opo"}),
        ("ppo", {"advantage": "gae"}),
        ("clip_cov", {"policy_loss": "clip_cov"}),
        ("kl_cov", {"policy_loss": "kl_cov"}),
    ],
)
def test_the_name_fills_in_its_row_and_nothing_else(name, row):
    config = AlgorithmConfig(name=name)
    assert config.model_dump() == {**DEFAULTS, "name": name, **row}
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


def test_every_preset_and_every_choice_is_known():
    assert len(PRESETS) == 15
    for name in PRESETS:
        config = AlgorithmConfig(name=name)
        assert config.policy_loss in POLICY_LOSSES
        assert config.aggregation in AGGREGATIONS
        assert config.advantage in {*GROUP_ADVANTAGES, "reinforce++", "gae"}
        assert config.kl_estimator in KL_ESTIMATORS


def test_a_field_that_is_given_wins_over_the_preset_even_with_the_default_value():
    config = AlgorithmConfig(name="dapo", clip_eps_high=0.2, kl_coef=0.5)
    assert (config.clip_eps_high, config.zero_std_groups, config.kl_coef) == (0.2, "resample", 0.5)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


def test_an_unknown_name_is_refused_with_the_known_ones():
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig(name="grpoo")
    assert '"grpoo" is not an algorithm' in str(caught.value)
    assert all(name in str(caught.value) for name in PRESETS)


def test_what_an_algorithm_needs():
    needs_groups = {name for name in PRESETS if AlgorithmConfig(name=name).compares_groups}
    assert set(PRESETS) - needs_groups == {"ppo", "reinforce++"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).uses_critic} == {"ppo"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).selects_by_cov} == {"clip_cov", "kl_cov"}
    assert not any(AlgorithmConfig(name=name).uses_ref for name in PRESETS)
    assert AlgorithmConfig(kl_coef=0.1).uses_ref
