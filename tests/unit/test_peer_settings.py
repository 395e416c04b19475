"""The table "The same loss elsewhere" in docs/reference/algorithms.md: each cell is run in its package."""

from __future__ import annotations

import re
import sys
from dataclasses import fields, replace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from skylite.algorithms import advantages
from skylite.config.algorithm import DISTILLATIONS, PRESETS, SOURCES, AlgorithmConfig
from skylite.config.train import TrainConfig
from tests.unit.peer_cases import (
    GROUP,
    MAX_TOKENS,
    Case,
    Result,
    assert_same,
    assert_same_result,
    make_case,
    ours,
    result_of,
)
from tests.unit.peer_code import PEERS, load_skyrl, load_trl, load_verl
from tests.unit.test_peers_advantages import credited, micro_for
from tests.unit.test_peers_losses import verl_loss
from tests.unit.test_peers_trl import trl_loss, trl_step

PAGE = Path(__file__).parents[2] / "docs" / "reference" / "algorithms.md"
TITLE = "## The same loss elsewhere"
SKYRL_SETTINGS = {
    "policy_loss_type": "regular",
    "loss_reduction": "token_mean",
    "eps_clip_low": 0.2,
    "eps_clip_high": 0.2,
    "max_seq_len": MAX_TOKENS,
}
TRL_EPS, OUR_EPS = 1e-4, 1e-6
Settings = dict[str, Any]


def table() -> dict[str, list[Settings]]:
    """Preset -> the settings of TRL, verl and SkyRL; empty where the cell is a dash."""
    section = PAGE.read_text(encoding="utf-8").partition(TITLE)[2].partition("Names and defaults")[0]
    rows = re.findall(r"^\| `([^`]+)` \|(.+)\|(.+)\|(.+)\|$", section, re.MULTILINE)
    return {name: [settings_of(cell) for cell in cells] for name, *cells in rows}


def settings_of(cell: str) -> Settings:
    return {key: value_of(value) for key, value in re.findall(r"`([a-z_]+)=([^`]+)`", cell)}


def value_of(text: str) -> Any:
    if text in ("true", "false"):
        return text == "true"
    try:
        return float(text)
    except ValueError:
        return text


def cells(column: int) -> Any:
    """Parametrize a test over the presets that have settings in this column."""
    filled = [(name, row[column]) for name, row in table().items() if row[column]]
    return pytest.mark.parametrize(("preset", "settings"), filled, ids=[name for name, _ in filled])


@pytest.fixture(scope="module")
def trl() -> SimpleNamespace:
    return load_trl()


@pytest.fixture(scope="module")
def verl() -> SimpleNamespace:
    return load_verl()


@pytest.fixture(scope="module")
def skyrl() -> ModuleType:
    return load_skyrl()


@pytest.fixture(params=[2, 5], ids=["float64", "float32"])
def case(request: pytest.FixtureRequest) -> Case:
    return make_case(12, 33, request.param, torch.float64 if request.param == 2 else torch.float32)


def fitting(preset: str, case: Case) -> Case:
    """Peers take the old policy for the sampler. In verl a group of equal rewards has an `otb`, too."""
    if preset == "otb":
        rewards = case.rewards.clone()
        rewards[-GROUP:] += torch.arange(GROUP)
        case = replace(case, rewards=rewards)
    is_sampler = AlgorithmConfig.model_validate({"name": preset}).is_unweighted
    return replace(case, old=case.rollout) if is_sampler else case


def our_advantages(preset: str, case: Case) -> Tensor:
    """[C], from rewards at the last token."""
    algorithm = AlgorithmConfig.model_validate({"name": preset})
    config = TrainConfig.model_validate({"algorithm": {"name": preset}})
    micro = micro_for(case, case.values[case.mask] if algorithm.uses_critic else None)
    found = credited(case, replace(micro, kl_penalty=None), config).advantages
    assert found is not None
    return found


def at_the_end(case: Case) -> Tensor:
    """[B, T]: each completion's reward at its last token."""
    rewards = torch.zeros_like(case.policy)
    rewards[torch.arange(len(case.mask)), case.lengths - 1] = case.rewards
    return rewards


def test_every_preset_has_a_row_and_a_peer() -> None:
    assert list(table()) == [name for name in PRESETS if name not in (*SOURCES, *DISTILLATIONS)]
    assert [name for name, row in table().items() if not any(row)] == ["pass_at_k", "raft", "online_dpo"]


@cells(0)
def test_trl(trl: SimpleNamespace, case: Case, preset: str, settings: Settings, monkeypatch) -> None:
    assert settings.keys() <= {field.name for field in fields(trl.trainer.GRPOConfig)}
    settings, case = dict(settings), fitting(preset, case)
    if preset == "luspo":  # here TRL broadcasts one loss per completion over its mask
        case = replace(case, mask=torch.ones_like(case.mask))
    scale = settings.pop("scale_rewards")
    aggregation = settings.pop("multi_objective_aggregation", "sum_then_normalize")
    epsilon = settings.get("epsilon", 0.2)
    given = {"epsilon_low": epsilon, "epsilon_high": epsilon} | {
        k: v for k, v in settings.items() if k != "epsilon"
    }
    theirs, _ = trl_loss(trl, case, **given)
    assert_same_result(ours(case, name=preset), theirs, case.mask)

    inputs = trl_step(
        trl,
        case,
        monkeypatch,
        mask_truncated_completions=False,
        scale_rewards=scale,
        multi_objective_aggregation=aggregation,
        vllm_importance_sampling_mode="token_truncate",
        vllm_importance_sampling_clip_min=None,
        vllm_importance_sampling_clip_max=2.0,
    )
    found = inputs["advantages"].to(case.rewards.dtype)
    if aggregation == "normalize_then_sum":
        monkeypatch.setattr(advantages, "EPS", TRL_EPS)
    elif scale == "group":
        spread = case.rewards.view(-1, GROUP).std(dim=1).repeat_interleave(GROUP)
        found = found * (spread + TRL_EPS) / (spread + OUR_EPS)
    mine = our_advantages(preset, case)
    assert (mine - found[case.sequences]).abs().max() <= 1e-5


@cells(1)
def test_verl(verl: SimpleNamespace, case: Case, preset: str, settings: Settings) -> None:
    known = (PEERS / "verl/trainer/config/_generated_ppo_trainer.yaml").read_text(encoding="utf-8")
    assert [key for key in settings if not re.search(rf"^ +{key}:", known, re.MULTILINE)] == []
    settings, case = dict(settings), fitting(preset, case)
    estimator = settings.pop("adv_estimator")
    by_std = settings.pop("norm_adv_by_std_in_grpo", True)
    theirs = verl.core.get_adv_estimator_fn(estimator)(
        token_level_rewards=at_the_end(case),
        response_mask=case.float_mask,
        **verl_arguments(case, estimator, by_std),
    )[0]
    assert_same(our_advantages(preset, case), theirs[case.mask])

    aggregation = settings.pop("loss_agg_mode", "token-mean").replace(
        "seq-mean-token-sum-norm", "fixed-length"
    )
    chosen = {"clip_cov_ratio": 2e-4, "clip_cov_lb": 1.0, "clip_cov_ub": 5.0, "kl_cov_ratio": 2e-4}
    if "ppo_kl_coef" in settings:
        chosen["ppo_kl_coef"] = settings.pop("ppo_kl_coef")
    if "dro_beta" in settings:
        chosen["dro_beta"] = settings.pop("dro_beta")
    name = settings.pop("loss_mode", "vanilla")
    loss, _ = verl_loss(verl, case, name, aggregation, policy_loss=chosen, **settings)
    assert_same_result(ours(case, name=preset), loss, case.mask)


def verl_arguments(case: Case, estimator: str, by_std: bool) -> Settings:
    """What each of verl's estimators takes besides rewards and mask."""
    if estimator == "gae":
        return {"values": case.values, "gamma": 1.0, "lam": 1.0}
    if estimator == "reinforce_plus_plus":
        return {"config": SimpleNamespace(gamma=1.0)}
    if estimator == "remax":
        return {"reward_baselines": case.greedy}
    if estimator == "optimal_token_baseline":
        return {"index": case.groups, "old_log_probs": case.old, "sum_pi_squared": case.sum_squares}
    return {"index": case.groups} | ({"norm_adv_by_std_in_grpo": by_std} if estimator == "grpo" else {})


def test_verls_default_is_dual_clip(verl: SimpleNamespace, case: Case) -> None:
    theirs, _ = verl_loss(verl, case, "vanilla", "token-mean", clip_ratio_c=3.0)
    assert_same_result(ours(case, policy_loss="dual_clip"), theirs, case.mask)


@cells(2)
def test_skyrl(skyrl: ModuleType, case: Case, preset: str, settings: Settings, monkeypatch) -> None:
    known = (PEERS / "skyrl/train/config/config.py").read_text(encoding="utf-8")
    assert [key for key in settings if not re.search(rf"^    {key}:", known, re.MULTILINE)] == []
    monkeypatch.setitem(sys.modules, "loguru", SimpleNamespace(logger=SimpleNamespace(warning=print)))
    settings, case = dict(settings), fitting(preset, case)
    estimator = settings.pop("advantage_estimator")
    theirs = skyrl.AdvantageEstimatorRegistry.get(estimator)(
        token_level_rewards=at_the_end(case),
        response_mask=case.float_mask,
        index=case.groups,
        gamma=1.0,
        grpo_norm_by_std=settings.pop("grpo_norm_by_std", True),
    )[0]
    assert_same(our_advantages(preset, case), theirs[case.mask])
    assert_same_result(ours(case, name=preset), skyrl_loss(skyrl, case, settings), case.mask)


def skyrl_loss(skyrl: ModuleType, case: Case, settings: Settings) -> Result:
    """One of SkyRL's policy losses on our tensors. It reduces by scaling the advantages first."""
    chosen = SKYRL_SETTINGS | settings
    scaled = skyrl.apply_loss_reduction_to_advantages_minibatch(
        case.token_advantages,
        case.float_mask,
        chosen["loss_reduction"],
        len(case.mask),
        chosen["max_seq_len"],
    )
    cispo = {key: value for key, value in chosen.items() if key.startswith("cispo_")}
    config = SimpleNamespace(
        **chosen,
        cispo=SimpleNamespace(**cispo),
        sapo=SimpleNamespace(tau_pos=1.0, tau_neg=1.05),
        dppo=SimpleNamespace(dppo_type="binary_tv", delta_low=0.2, delta_high=0.2),
        off_policy_correction=None,
    )
    policy = case.policy.clone().requires_grad_()
    loss, _ = skyrl.PolicyLossRegistry.get(chosen["policy_loss_type"])(
        policy, case.old, scaled, config, case.float_mask, None
    )
    return result_of(loss, policy, case.entropies.clone().requires_grad_())
