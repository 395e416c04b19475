"""algorithm.name fills in the other algorithm settings; explicit settings override it."""

import pytest
from pydantic import ValidationError

from skylite.algorithms.advantages import GROUP_ADVANTAGES
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
)
from skylite.config.algorithm import PRESETS, AlgorithmConfig

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
        ("sft", {}),
        ("dpo", {}),
    ],
)
def test_the_name_sets_its_row_and_nothing_else(name, row):
    config = AlgorithmConfig(name=name)
    assert config.model_dump() == {**DEFAULTS, "name": name, **row}
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


def test_every_preset_and_choice_is_implemented():
    assert len(PRESETS) == 17
    for name in PRESETS:
        config = AlgorithmConfig(name=name)
        assert config.policy_loss in POLICY_LOSSES
        assert config.aggregation in AGGREGATIONS
        assert config.advantage in {*GROUP_ADVANTAGES, "reinforce++", "gae"}
        assert config.kl_estimator in KL_ESTIMATORS


def test_an_explicit_field_overrides_the_preset_even_with_the_default_value():
    config = AlgorithmConfig(name="dapo", clip_eps_high=0.2, kl_coef=0.5)
    assert (config.clip_eps_high, config.zero_std_groups, config.kl_coef) == (0.2, "resample", 0.5)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_settings_of_rewards_are_refused_for_prepared_data(name):
    with pytest.raises(ValidationError, match="has no effect with"):
        AlgorithmConfig(name=name, kl_coef=0.1)
    assert AlgorithmConfig(name=name, updates_per_step=2, kl_ref="base").source != "rollouts"


def test_an_unknown_name_is_refused_and_the_known_ones_listed():
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig(name="grpoo")
    assert '"grpoo" is not an algorithm' in str(caught.value)
    assert all(name in str(caught.value) for name in PRESETS)


def test_what_each_algorithm_requires():
    needs_groups = {name for name in PRESETS if AlgorithmConfig(name=name).compares_groups}
    assert set(PRESETS) - needs_groups == {"ppo", "reinforce++", "sft", "dpo"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).uses_critic} == {"ppo"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).selects_by_cov} == {"clip_cov", "kl_cov"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).uses_ref} == {"dpo"}
    assert AlgorithmConfig(kl_coef=0.1).uses_ref
