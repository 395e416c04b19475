"""skylite and verl compute the same losses, gradients and importance weights from the same tensors.

Their tensors are padded [B, T] with a mask and random numbers as padding. Ours are completion tokens [C] and
go through `micro_batch_loss` as in a training step.
"""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skylite.algorithms.advantages import COMPONENT_ADVANTAGES, GROUP_ADVANTAGES
from skylite.algorithms.importance import importance_weights
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import AGGREGATIONS, POLICY_LOSSES, value_loss
from skylite.config.train import TrainConfig
from tests.unit.peer_cases import (
    MAX_TOKENS,
    SHAPES,
    TOLERANCE,
    Case,
    Result,
    assert_same,
    assert_same_result,
    make_case,
    ours,
    result_of,
    shape_id,
)
from tests.unit.peer_code import VerlConfig, load_verl


@pytest.fixture(scope="module")
def verl() -> SimpleNamespace:
    return load_verl()


@pytest.fixture(params=SHAPES, ids=shape_id)
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(*request.param)


VERL_AGGREGATION = {
    "token-mean": "token-mean",
    "seq-mean-token-sum": "seq-mean-token-sum",
    "seq-mean-token-mean": "seq-mean-token-mean",
    "fixed-length": "seq-mean-token-sum-norm",
}


def verl_loss(
    verl: SimpleNamespace,
    case: Case,
    name: str,
    aggregation: str,
    weights: Tensor | None = None,
    **settings: Any,
) -> tuple[Result, dict[str, float]]:
    """One of verl's registered policy losses on our tensors, and its metrics."""
    chosen = {
        "clip_cov_ratio": 1.0,
        "clip_cov_lb": 0.0,
        "clip_cov_ub": 9.0,
        "kl_cov_ratio": 0.1,
        "ppo_kl_coef": 0.7,
    }
    plain = {
        "clip_ratio": 0.2,
        "clip_ratio_low": 0.2,
        "clip_ratio_high": 0.2,
        "clip_ratio_c": 1e9,
        "tau_pos": 1.0,
        "tau_neg": 1.05,
    }
    policy_loss = SimpleNamespace(**chosen | settings.pop("policy_loss", {}))
    sizes = {"loss_scale_factor": MAX_TOKENS}
    config = VerlConfig(**plain | settings, policy_loss=policy_loss, global_batch_info=sizes)
    policy = case.policy.clone().requires_grad_()
    torch.manual_seed(0)
    loss, metrics = verl.core.get_policy_loss_fn(name)(
        case.old,
        policy,
        case.token_advantages,
        case.float_mask,
        VERL_AGGREGATION[aggregation],
        config,
        weights,
    )
    return result_of(loss, policy, case.entropies.clone().requires_grad_()), metrics


@pytest.mark.parametrize("aggregation", list(VERL_AGGREGATION))
@pytest.mark.parametrize(
    ("name", "settings", "algorithm"),
    [
        ("vanilla", {}, {}),
        (
            "vanilla",
            {"clip_ratio_low": 0.1, "clip_ratio_high": 0.4},
            {"clip_eps_low": 0.1, "clip_eps_high": 0.4},
        ),
        ("vanilla", {"clip_ratio_c": 1.3}, {"policy_loss": "dual_clip", "dual_clip": 1.3}),
        ("gspo", {"clip_ratio_low": 3e-4, "clip_ratio_high": 4e-4}, {"name": "gspo"}),
        ("cispo", {"clip_ratio_low": 1.0, "clip_ratio_high": 0.5}, {"name": "cispo", "clip_eps_high": 0.5}),
        ("clip_cov", {}, {"name": "clip_cov", "cov_frac": 1.0, "clip_cov_low": 0.0, "clip_cov_high": 9.0}),
        (
            "clip_cov",
            {"policy_loss": {"clip_cov_ratio": 0.05}},
            {"name": "clip_cov", "cov_frac": 0.05, "clip_cov_low": 0.0, "clip_cov_high": 9.0},
        ),
        ("kl_cov", {}, {"name": "kl_cov", "cov_frac": 0.1, "kl_cov_coef": 0.7}),
    ],
    ids=["clip", "clip-higher", "dual_clip", "gspo", "cispo", "clip_cov-all", "clip_cov-drawn", "kl_cov"],
)
def test_verl_losses_under_every_aggregation(verl, case, name, settings, algorithm, aggregation):
    theirs, _ = verl_loss(verl, case, name, aggregation, **settings)
    assert_same_result(ours(case, **algorithm | {"aggregation": aggregation}), theirs, case.mask)


def test_verl_sapo(verl, case):
    theirs, _ = verl_loss(verl, case, "sapo", "seq-mean-token-mean", tau_pos=0.8, tau_neg=2.0)
    assert_same_result(ours(case, name="sapo", sapo_tau_pos=0.8, sapo_tau_neg=2.0), theirs, case.mask)


@pytest.mark.parametrize("name", ["dro", "dppo_tv", "dppo_kl"])
def test_verl_losses_with_the_ratio_to_the_sampler(verl, case, name):
    policy, sampler = (x.clamp(max=-0.01) for x in (case.policy, case.rollout))  # probabilities
    case = replace(case, policy=policy, rollout=sampler, old=sampler)
    theirs, _ = verl_loss(
        verl,
        case,
        name,
        "token-mean",
        clip_ratio_low=0.1,
        clip_ratio_high=0.15,
        policy_loss={"dro_beta": 0.3},
    )
    mine = ours(
        case, policy_loss=name.removesuffix("_tv"), clip_eps_low=0.1, clip_eps_high=0.15, dro_beta=0.3
    )
    if name == "dro":
        assert_same_result(mine, theirs, case.mask)
    else:  # verl's has another value: the ratio as a constant, times the logprob
        assert_same(mine.by_policy, theirs.by_policy[case.mask])


def test_verl_geometric_mean(verl, case):
    theirs, _ = verl_loss(verl, case, "geo_mean", "token-mean", clip_ratio_low=0.3, clip_ratio_high=0.4)
    mine = ours(case, name="gmpo", clip_eps_low=0.3)
    assert_same_result(mine, theirs, case.mask)


@pytest.mark.parametrize(("name", "algorithm"), [("vanilla", {}), ("gspo", {"policy_loss": "gspo"})])
def test_verl_counts_the_same_tokens_as_clipped(verl, case, name, algorithm):
    _, metrics = verl_loss(verl, case, name, "token-mean")
    share = ours(case, **algorithm).sums["policy/clipped_frac"] / case.mask.sum()
    assert float(share) == pytest.approx(metrics["actor/pg_clipfrac"], rel=TOLERANCE)


@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_verl_kl_estimators(verl, case, name):
    mine, theirs = case.policy[case.mask].requires_grad_(), case.policy[case.mask].requires_grad_()
    ref = case.ref[case.mask]
    my_kl, their_kl = KL_ESTIMATORS[name](mine, ref), verl.core.kl_penalty(theirs, ref, name)
    assert_same(my_kl.detach(), their_kl.detach())
    my_kl.sum().backward()
    their_kl.sum().backward()
    assert_same(mine.grad, theirs.grad)


def test_verl_value_loss(verl, case):
    returns = case.values + case.policy
    old = case.values + 0.4 * (case.ref - case.old)
    theirs = case.values.clone().requires_grad_()
    their_loss, _ = verl.core.compute_value_loss(theirs, returns, old, case.float_mask, 0.1)
    their_loss.backward()
    mine = case.values[case.mask].requires_grad_()
    my_loss = value_loss(mine, old[case.mask], returns[case.mask], 0.1).mean()
    my_loss.backward()
    assert_same(my_loss.detach(), their_loss.detach())
    assert_same(mine.grad, theirs.grad[case.mask])


@pytest.mark.parametrize(
    ("level", "threshold", "settings"),
    [
        ("token", 1.4, {"cap": 1.4}),
        ("token", "0.7_1.4", {"mode": "mask", "cap": 1.4, "floor": 0.7}),
        ("sequence", 1.4, {"cap": 1.4}),
        ("sequence", "0.1_3", {"mode": "mask", "cap": 3.0, "floor": 0.1}),
    ],
    ids=["token-truncate", "token-mask", "sequence-truncate", "sequence-mask"],
)
def test_verl_importance_weights_in_the_loss(verl, case, level, threshold, settings):
    weights, metrics = verl.corrections.compute_rollout_correction_weights(
        case.old - case.rollout, case.float_mask, level, threshold
    )
    theirs, _ = verl_loss(verl, case, "vanilla", "token-mean", weights)
    mine = ours(case, {"level": level, **settings})
    assert_same_result(mine, theirs, case.mask)
    if level == "token":
        low = metrics["rollout_is_ratio_fraction_low"] if "floor" in settings else 0
        changed = mine.sums["mismatch/importance_changed_frac"] / case.mask.sum()
        assert float(changed) == pytest.approx(metrics["rollout_is_ratio_fraction_high"] + low, rel=TOLERANCE)


@pytest.mark.parametrize("limit", [0.1, 0.2, 0.4])
def test_verl_rejects_the_same_completions(verl, case, limit):
    kept, _ = verl.corrections.compute_rollout_rejection_mask(
        case.old - case.rollout, case.float_mask, "seq_mean_k3", limit
    )
    config = TrainConfig.model_validate({"importance": {"mode": "none", "reject_kl": limit}}).importance
    weights, _ = importance_weights(
        case.old[case.mask], case.rollout[case.mask], case.sequences, len(case.mask), config
    )
    assert weights.tolist() == kept[case.mask].tolist()


def test_verl_mismatch_metrics(verl, case):
    sums = ours(case).sums
    kl = verl.corrections.compute_offpolicy_metrics(case.old, case.rollout, case.float_mask)["k3_kl"]
    assert float(sums["mismatch/kl"] / case.mask.sum()) == pytest.approx(kl, rel=TOLERANCE)
    _, metrics = verl.corrections.compute_rollout_correction_weights(
        case.old - case.rollout, case.float_mask, "token", 1e9
    )
    share = sums["ess/weights"] ** 2 / (case.mask.sum() * sums["ess/squares"])
    assert float(share) == pytest.approx(metrics["rollout_is_eff_sample_size"], rel=TOLERANCE)


def test_every_advantage_and_loss_is_compared_with_a_peer():
    """A new algorithm fails here until it is compared above."""
    assert set(GROUP_ADVANTAGES) == {
        "grpo",
        "dr_grpo",
        "rloo",
        "opo",
        "reinforce++-baseline",
        "maxrl",
        "best",
    }
    assert set(COMPONENT_ADVANTAGES) == {"gdpo"}
    of_verl = {"clip", "dual_clip", "gspo", "cispo", "sapo", "clip_cov", "kl_cov", "gmpo", "dro"}
    assert set(POLICY_LOSSES) == of_verl | {"dppo", "dppo_kl", "vespo", "cross_entropy"}
    assert set(AGGREGATIONS) == set(VERL_AGGREGATION)
    assert set(KL_ESTIMATORS) == {"k1", "k2", "k3"}
