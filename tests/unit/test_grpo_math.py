"""Advantages, loss and logprobs against numbers worked out by hand."""

import math

import pytest
import torch

from skylite.config import GrpoConfig
from skylite.grpo.advantages import equal_reward_groups, group_advantages
from skylite.grpo.batch import pack_padded, pack_tree, score_groups
from skylite.grpo.logprobs import token_logprobs
from skylite.grpo.losses import LossInputs, k3_kl, policy_loss
from skylite.run.rollout_file import TrainSample
from skylite.training.schedule import learning_rate
from tests.reference import settings

CPU = torch.device("cpu")


def loss_of(
    ratio: float, advantage: float, *, weight_log: float = 0.0, ref: float | None = None, **grpo: float | None
) -> tuple[float, float]:
    """Loss and its derivative by the policy's logprob for one token whose old logprob is -1."""
    old = torch.tensor([-1.0])
    policy = (old + math.log(ratio)).requires_grad_()
    inputs = LossInputs(
        policy_logprobs=policy,
        old_logprobs=old,
        rollout_logprobs=old - weight_log,
        advantages=torch.tensor([advantage]),
        ref_logprobs=None if ref is None else torch.tensor([ref]),
    )
    loss = policy_loss(inputs, GrpoConfig(**grpo), num_loss_tokens=1).loss
    loss.backward()
    return loss.item(), policy.grad.item()


def test_advantages_of_one_right_answer_in_four():
    # mean 0.25, sample standard deviation 0.5: (1 - 0.25) / 0.5 = 1.5 and -0.25 / 0.5 = -0.5
    advantages = group_advantages(torch.tensor([[1.0, 0.0, 0.0, 0.0]]))
    assert advantages[0].tolist() == pytest.approx([1.5, -0.5, -0.5, -0.5], rel=1e-5)


def test_advantages_without_the_standard_deviation():
    assert group_advantages(torch.tensor([[3.0, 1.0]]), normalize_std=False)[0].tolist() == [1.0, -1.0]


def test_equal_rewards_give_exact_zeros_whatever_the_rounding_of_their_mean():
    rewards = torch.full((1, 7), 0.1)
    assert (rewards - rewards.mean()).abs().max() > 0  # the trap is there
    assert group_advantages(rewards).tolist() == [[0.0] * 7]
    assert equal_reward_groups(torch.tensor([[1.0, 1.0], [1.0, 0.0]])).tolist() == [True, False]


def test_loss_of_the_first_update_is_minus_the_advantage():
    assert loss_of(1.0, 1.5) == pytest.approx((-1.5, -1.5))


@pytest.mark.parametrize(
    ("ratio", "advantage", "loss", "slope"),
    [
        (1.1, 2.0, -2.2, -2.2),  # inside the bounds
        (1.5, 2.0, -2.4, 0.0),  # too likely already: clipped at 1.2, no gradient
        (1.5, -2.0, 3.0, 3.0),  # bad and more likely: never clipped
        (0.5, -2.0, 1.6, 0.0),  # bad and unlikely already: clipped at 0.8
        (0.5, 2.0, -1.0, -1.0),  # good and unlikely: never clipped
    ],
)
def test_clipping_works_in_the_direction_of_the_advantage(ratio, advantage, loss, slope):
    assert loss_of(ratio, advantage) == pytest.approx((loss, slope), abs=1e-6)


def test_clip_higher_moves_the_upper_bound_alone():
    assert loss_of(1.25, 1.0, clip_eps_high=0.28)[0] == pytest.approx(-1.25)
    assert loss_of(1.5, 1.0, clip_eps_high=0.28)[0] == pytest.approx(-1.28)
    assert loss_of(0.5, -1.0, clip_eps_high=0.28)[0] == pytest.approx(0.8)


def test_importance_weight_is_capped_and_can_be_off():
    assert loss_of(1.0, 1.0, weight_log=math.log(1.5))[0] == pytest.approx(-1.5)
    assert loss_of(1.0, 1.0, weight_log=math.log(7.0))[0] == pytest.approx(-2.0)
    assert loss_of(1.0, 1.0, weight_log=math.log(7.0), importance_cap=None)[0] == pytest.approx(-1.0)


def test_k3_kl_by_hand():
    # policy 0.5, reference 0.25: 0.5 - log 0.5 - 1 = 0.1931
    assert k3_kl(torch.tensor([0.5]).log(), torch.tensor([0.25]).log()).item() == pytest.approx(0.5 + math.log(2) - 1)
    loss, slope = loss_of(1.0, 0.0, ref=-1.0 - math.log(2), kl_coef=0.1)
    assert loss == pytest.approx(0.1 * (0.5 + math.log(2) - 1))
    assert slope == pytest.approx(0.1 * (1 - 0.5))  # d k3 / d policy = 1 - exp(ref - policy)


def test_the_loss_is_divided_by_the_global_token_count():
    logprobs = torch.zeros(3)
    inputs = LossInputs(policy_logprobs=logprobs, old_logprobs=logprobs, rollout_logprobs=logprobs, advantages=torch.ones(3))
    assert policy_loss(inputs, GrpoConfig(), num_loss_tokens=12).loss.item() == pytest.approx(-3 / 12)


def test_token_logprobs_equal_log_softmax_and_its_gradient():
    torch.manual_seed(0)
    logits = torch.randn(5, 11)
    rows, targets = torch.tensor([0, 3, 3, 4]), torch.tensor([2, 0, 7, 7])
    mine, plain = logits.clone().requires_grad_(), logits.clone().requires_grad_()
    weights = torch.tensor([1.0, -2.0, 0.5, 3.0])
    got, entropy = token_logprobs(mine * 1.0, rows, targets, temperature=0.7)
    (got * weights).sum().backward()
    table = torch.log_softmax(plain / 0.7, dim=1)
    (table[rows, targets] * weights).sum().backward()
    assert torch.allclose(got, table[rows, targets], atol=1e-6)
    assert torch.allclose(entropy, -(table.exp() * table).sum(1)[rows], atol=1e-6)
    assert torch.allclose(mine.grad, plain.grad, atol=1e-6)
    assert not entropy.requires_grad


@pytest.mark.parametrize("pack", [lambda p, c: pack_padded([p], [c], CPU), lambda p, c: pack_tree([p], [c], [0], CPU)])
def test_each_completion_token_is_predicted_by_the_token_before_it(pack):
    # prompt [7, 8], completion [9, 10, 11]: the rows that predict are those of 8, 9 and 10; 11 is never an input.
    tokens = pack([7, 8], [9, 10, 11])
    assert tokens.inputs["input_ids"].tolist() == [[7, 8, 9, 10]]
    kept = tokens.inputs["logits_to_keep"][tokens.rows].tolist()
    assert [tokens.inputs["input_ids"][0, k].item() for k in kept] == [8, 9, 10]
    assert tokens.targets.tolist() == [9, 10, 11]


def test_a_group_of_another_size_is_refused():
    from skylite.errors import DataError

    sample = TrainSample(group=0, prompt_token_ids=[1], completion_token_ids=[2], rollout_logprobs=[-1.0], reward=0.0, truncated=False)
    other = TrainSample(group=1, prompt_token_ids=[1], completion_token_ids=[2], rollout_logprobs=[-1.0], reward=0.0, truncated=False)
    with pytest.raises(DataError, match="same size"):
        score_groups([sample, sample, other], GrpoConfig())


def test_learning_rate_schedules():
    def rates(schedule: str, warmup: int = 0) -> list[float]:
        config = settings(optim={"lr": 1.0, "schedule": schedule, "warmup_steps": warmup}).optim
        return [learning_rate(step, 4, config) for step in (1, 2, 3, 4)]

    assert rates("constant", 2) == [0.5, 1.0, 1.0, 1.0]
    assert rates("linear") == [1.0, 0.75, 0.5, 0.25]
    assert rates("cosine") == pytest.approx([1.0, 0.8535534, 0.5, 0.1464466])
