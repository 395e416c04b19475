"""skylite, verl and SkyRL compute the same advantages from the same tensors.

Their tensors are padded [B, T] with a mask and random numbers as padding. Ours are completion tokens [C].
Losses: test_peers_losses.py. TRL: test_peers_trl.py. Their code: peer_code.py.
"""

from __future__ import annotations

import sys
from dataclasses import replace
from types import ModuleType, SimpleNamespace

import pytest
import torch
from torch import Tensor

from skylite.algorithms.advantages import GROUP_ADVANTAGES, Components, gdpo, score_norms
from skylite.algorithms.losses import BatchSize
from skylite.config.train import TrainConfig
from skylite.run.rollout_file import examples_of
from skylite.trainer.micro_batches import KEY_STRIDE, MicroBatch
from skylite.trainer.precompute import credit
from skylite.trainer.trainer import make_algorithm
from tests.cases import table_of
from tests.rows import groups_of
from tests.unit.peer_cases import (
    ALONE,
    GROUP,
    SHAPES,
    Case,
    assert_same,
    make_case,
    packed,
    samples_of,
    shape_id,
)
from tests.unit.peer_code import load_skyrl, load_verl


@pytest.fixture(scope="module")
def verl() -> SimpleNamespace:
    return load_verl()


@pytest.fixture(scope="module")
def skyrl() -> ModuleType:
    return load_skyrl()


@pytest.fixture(params=SHAPES, ids=shape_id)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(*request.param)


def verl_group_advantages(verl: SimpleNamespace, name: str, token_rewards: Tensor, case: Case) -> Tensor:
    core = verl.core
    function, more = {
        "grpo": (core.compute_grpo_outcome_advantage, {}),
        "dr_grpo": (core.compute_grpo_outcome_advantage, {"norm_adv_by_std_in_grpo": False}),
        "rloo": (core.compute_rloo_outcome_advantage, {}),
        "opo": (core.compute_opo_outcome_advantage, {}),
        "reinforce++-baseline": (core.compute_reinforce_plus_plus_baseline_outcome_advantage, {}),
    }[name]
    advantages: Tensor = function(token_rewards, case.float_mask, index=case.groups, **more)[0]
    return advantages


def group_advantages(name: str, case: Case) -> Tensor:
    """Our advantages [C]."""
    grid = (-1, GROUP)
    advantages = GROUP_ADVANTAGES[name](
        case.rewards.view(grid), case.lengths.view(grid).to(case.rewards.dtype)
    )
    return advantages.flatten()[case.sequences]


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce++-baseline"])
def test_verl_group_advantages(verl, case, name):
    at_the_end = torch.zeros_like(case.policy)
    at_the_end[torch.arange(len(case.mask)), case.lengths - 1] = case.rewards
    theirs = verl_group_advantages(verl, name, at_the_end, case)
    assert_same(group_advantages(name, case), theirs[case.mask])


@pytest.mark.parametrize("name", ["grpo", "dr_grpo", "rloo", "opo", "reinforce++-baseline"])
def test_verl_group_advantages_with_the_kl_in_the_reward(verl, name):
    case = make_case(12, 33, 8, torch.float32)
    theirs = verl_group_advantages(verl, name, case.token_rewards, case)
    config = TrainConfig.model_validate({"algorithm": {"advantage": name, "kl_coef": 0.1, "kl_in": "reward"}})
    micro = credited(case, micro_for(case, None), config)
    assert micro.advantages is not None
    assert_same(micro.advantages, theirs[case.mask])
    assert micro.returns is None


def test_verl_gdpo_where_completions_are_equally_long(verl):
    """verl whitens over 12 * 33 tokens, and the paper over 12 completions: 11 and 395 degrees of freedom."""
    case = make_case(12, 33, 9, torch.float64)
    case = replace(case, mask=torch.ones_like(case.mask))
    scores = torch.stack([case.rewards, case.values[:, 0]], dim=1)
    theirs, _ = verl.core.compute_gdpo_outcome_advantage(
        torch.zeros_like(case.policy),
        case.float_mask,
        case.groups,
        config={"gdpo_reward_keys": ["a", "b"], "gdpo_reward_weights": [1.0, 0.25]},
        non_tensor_batch=dict(zip("ab", scores.T.numpy(), strict=True)),
        batch={"prompts": case.mask[:, :1], "attention_mask": torch.ones(12, 34, dtype=torch.int64)},
    )
    found = gdpo(Components(("a", "b"), scores.view(-1, GROUP, 2), torch.tensor([1.0, 0.25])))
    assert (found.flatten() - theirs[:, 0] * (33 * 11 / 395) ** 0.5).abs().max() < 1e-5


def credited(case: Case, micro: MicroBatch, config: TrainConfig) -> MicroBatch:
    table, algorithm = table_of(samples_of(case), config), make_algorithm(config)
    (micro,) = credit(table, [micro], algorithm, ALONE)
    return micro


def micro_for(case: Case, values: Tensor | None) -> MicroBatch:
    rows, count = samples_of(case), int(case.mask.sum())
    return MicroBatch(
        examples=examples_of(groups_of(rows)),
        numbers=list(range(len(rows))),
        tokens=packed(case),
        keys=case.sequences * KEY_STRIDE + torch.cumsum(case.mask, dim=1)[case.mask] - 1,
        token_weights=torch.ones(count),
        size=BatchSize(count, len(rows), 1),
        sampling_logprobs=case.rollout[case.mask],
        norms=score_norms(case.old, case.sum_squares)[case.mask],
        kl_penalty=0.1 * (case.old - case.ref)[case.mask],
        values=values,
    )


@pytest.mark.parametrize("gamma", [1.0, 0.9])
def test_verl_reinforce_plus_plus(verl, case, gamma):
    theirs, _ = verl.core.compute_reinforce_plus_plus_outcome_advantage(
        case.token_rewards, case.float_mask, config=SimpleNamespace(gamma=gamma)
    )
    config = TrainConfig.model_validate({"algorithm": {"name": "reinforce++", "gamma": gamma}})
    micro = credited(case, micro_for(case, None), config)
    assert micro.advantages is not None
    assert_same(micro.advantages, theirs[case.mask])
    assert micro.returns is None


@pytest.mark.parametrize(("gamma", "lam"), [(1.0, 1.0), (0.99, 0.95), (0.9, 0.0)])
def test_verl_gae(verl, case, gamma, lam):
    theirs, returns = verl.core.compute_gae_advantage_return(
        case.token_rewards, case.values, case.float_mask, gamma, lam
    )
    config = TrainConfig.model_validate({"algorithm": {"name": "ppo", "gamma": gamma, "gae_lambda": lam}})
    micro = credited(case, micro_for(case, case.values[case.mask]), config)
    assert micro.advantages is not None
    assert micro.returns is not None
    assert_same(micro.advantages, theirs[case.mask])
    assert_same(micro.returns, returns[case.mask])


def test_verl_optimal_token_baseline(verl, case):
    """With a KL in the reward, so that no group has equal returns."""
    theirs, _ = verl.core.compute_optimal_token_baseline_advantage(
        case.token_rewards,
        case.float_mask,
        case.groups,
        old_log_probs=case.old,
        sum_pi_squared=case.sum_squares,
    )
    config = TrainConfig.model_validate({"algorithm": {"name": "otb", "kl_coef": 0.1, "kl_in": "reward"}})
    micro = credited(case, micro_for(case, None), config)
    assert micro.advantages is not None
    assert_same(micro.advantages, theirs[case.mask].float())


def test_skyrl_maxrl(skyrl, case):
    rewards = torch.zeros_like(case.policy)
    rewards[:, 0] = case.rewards
    theirs, _ = skyrl.compute_maxrl_advantage(rewards, case.float_mask, case.groups)
    assert_same(group_advantages("maxrl", case), theirs[case.mask])


def test_no_fake_module_stays_loaded(verl, skyrl):
    fakes = {"verl", "skyrl", "ray", "jaxtyping", "omegaconf", "tensordict", "loguru"}
    empty = {name for name, module in sys.modules.items() if getattr(module, "__file__", None) is None}
    assert not [name for name in empty if name.partition(".")[0] in fakes]
    assert not [name for name in sys.modules if name.partition(".")[0] in ("verl", "skyrl")]


def test_a_missing_peer_is_reported(monkeypatch, tmp_path):
    monkeypatch.setattr("tests.unit.peer_code.PEERS", tmp_path)
    for name, load in (("verl", load_verl), ("skyrl", load_skyrl)):
        with pytest.raises(
            pytest.fail.Exception, match=rf"{name} .* is not installed in .*; run `make setup`"
        ):
            load()
