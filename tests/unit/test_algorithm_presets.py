"""algorithm.name fills in the other algorithm settings; explicit settings override it."""

from typing import get_args

import pytest
from pydantic import ValidationError

from skylite.algorithms.advantages import COMPONENT_ADVANTAGES, GROUP_ADVANTAGES
from skylite.algorithms.kl import KL_ESTIMATORS
from skylite.algorithms.losses import (
    AGGREGATIONS,
    POLICY_LOSSES,
)
from skylite.config import algorithm
from skylite.config.algorithm import PRESETS, AlgorithmConfig
from skylite.config.rollout import GREEDY, RewardParameters
from skylite.config.train import TrainConfig
from skylite.rewards.built_in import BUILT_IN

DEFAULTS = AlgorithmConfig().model_dump()


@pytest.mark.parametrize("name", PRESETS)
def test_the_name_sets_its_row_and_nothing_else(name):
    config = AlgorithmConfig(name=name)
    assert config.model_dump() == {**DEFAULTS, "name": name, **PRESETS[name]}
    assert AlgorithmConfig.model_validate(config.model_dump()) == config
    assert AlgorithmConfig.model_validate_json(config.model_dump_json()) == config


def test_every_choice_has_a_function() -> None:
    # pass_at_k has a parameter, remax reads a component; PolicyGradient computes the others for each token
    others = {"pass_at_k", "remax", "reinforce++", "gae", "otb"}
    assert set(get_args(algorithm.Advantage)) == {*GROUP_ADVANTAGES, *COMPONENT_ADVANTAGES, *others}
    assert set(get_args(algorithm.PolicyLoss)) == set(POLICY_LOSSES)
    assert set(get_args(algorithm.Aggregation)) == set(AGGREGATIONS)
    assert set(get_args(AlgorithmConfig.model_fields["kl_estimator"].annotation)) == set(KL_ESTIMATORS)


def test_every_reward_has_a_function_of_its_own() -> None:
    parameters = RewardParameters(pattern="x", max_length=5)
    functions = [reward.function(parameters) for reward in BUILT_IN.values()]
    assert len({getattr(f, "__qualname__", type(f).__name__) for f in functions}) == len(BUILT_IN)


def test_an_explicit_field_overrides_the_preset_even_with_the_default_value():
    config = AlgorithmConfig(name="dapo", clip_eps_high=0.2, kl_coef=0.5)
    assert (config.clip_eps_high, config.zero_std_groups, config.kl_coef) == (0.2, "resample", 0.5)
    assert AlgorithmConfig.model_validate(config.model_dump()) == config


@pytest.mark.parametrize("name", ["sft", "dpo"])
def test_settings_of_rewards_are_refused_for_prepared_data(name):
    with pytest.raises(ValidationError, match="has no effect with"):
        AlgorithmConfig(name=name, kl_coef=0.1)
    assert AlgorithmConfig(name=name, updates_per_step=2, kl_ref="base").source != "rollouts"


@pytest.mark.parametrize(
    ("setting", "shown"),
    [
        ({"zero_std_groups": "drop"}, "zero_std_groups=drop"),
        ({"overlong_buffer_frac": 0.2}, "overlong_buffer_frac=0.2"),
        ({"kl_in": "reward", "kl_coef": 0.1}, "kl_in=reward"),
    ],
)
def test_gdpo_refuses_what_works_on_the_sum_of_the_rewards(setting, shown):
    with pytest.raises(ValidationError, match=rf"{shown} looks at or changes the sum"):
        AlgorithmConfig(name="gdpo", **setting)
    assert AlgorithmConfig(name="gdpo", kl_in="reward").advantage == "gdpo"


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        (
            {"algorithm": {"name": "gdpo"}, "env": {"episode": "guess"}},
            "limit_reward=0 has no components, and algorithm.advantage=gdpo",
        ),
        (
            {"algorithm": {"name": "gdpo"}, "env": {"episode": "guess", "limit_reward": {"right": 0.0}}},
            "this run has only right",
        ),
        (
            {"algorithm": {"component_advantages": {"a": "rloo"}}},
            "has no effect with algorithm.advantage=grpo",
        ),
        ({"algorithm": {"name": "online_dpo", "clip_eps_high": 0.3}}, "compares the best of a group with"),
        ({"algorithm": {"preference_loss": "ipo"}}, "preference_loss=ipo has no effect with .*name=grpo"),
        (
            {"algorithm": {"name": "raft"}, "importance": {"mode": "mask"}},
            "importance.mode=mask has no effect",
        ),
        ({"algorithm": {"name": "dro"}, "importance": {"cap": 3.0}}, "importance.cap=3.0 has no effect with"),
        ({"algorithm": {"kl_bias_correction": True}}, "kl_coef=0 with kl_in=loss puts none there"),
        (
            {"algorithm": {"name": "remax"}, "env": {"episode": "guess"}},
            r"advantage=remax asks for a greedy .* several \(env.episode=guess\)",
        ),
        (
            {
                "algorithm": {"name": "remax"},
                "reward": {"functions": ["gsm8k", "judge"], "judge": {"url": "base"}},
            },
            "advantage=remax asks for a greedy .* the judge",
        ),
        ({"algorithm": {"name": "remax", "zero_std_groups": "drop"}}, "zero_std_groups=drop is for"),
        ({"algorithm": {"name": "dapo", "advantage": "remax"}}, "use algorithm.zero_std_groups=keep"),
        ({"algorithm": {"name": "remax", "at_most": {"long": 1.0}}}, "advantage=remax does not allow"),
        ({"algorithm": {"name": "otb", "at_most": {"long": 1.0}}}, "advantage=otb does not allow"),
        (
            {"algorithm": {"name": "opd", "reward_weight": 1.0, "advantage": "otb"}},
            "advantage=otb does not go with the teacher of algorithm.name=opd",
        ),
        ({"algorithm": {"name": "pass_at_k", "pass_k": 9}}, "pass_k=9 is over rollout.group_size=8"),
    ],
)
def test_what_does_not_fit_a_rule_on_components_is_refused(settings, reason):
    with pytest.raises(ValidationError, match=reason):
        TrainConfig.model_validate(settings)
    names = {"right": 0.0, "short": 0.0}
    TrainConfig.model_validate(
        {"algorithm": {"name": "gdpo"}, "env": {"episode": "guess", "limit_reward": names}}
    )


def test_the_name_of_the_greedy_reward_is_taken() -> None:
    with pytest.raises(ValueError, match=f"keeps the reward of a greedy completion as {GREEDY}"):
        AlgorithmConfig(name="remax").check_components(["right", GREEDY])
    AlgorithmConfig().check_components(["right", GREEDY])


def test_an_unknown_name_is_refused_and_the_known_ones_listed():
    with pytest.raises(ValidationError) as caught:
        AlgorithmConfig(name="grpoo")
    assert '"grpoo" is not an algorithm' in str(caught.value)
    assert all(name in str(caught.value) for name in PRESETS)


def test_what_each_algorithm_requires():
    needs_groups = {name for name in PRESETS if AlgorithmConfig(name=name).compares_groups}
    assert set(PRESETS) - needs_groups == {
        "ppo",
        "reinforce++",
        "remax",
        "opd",
        "gkd",
        "opsd",
        "sdft",
        "sdpo",
        "sft",
        "dpo",
        "ipo",
    }
    assert {name for name in PRESETS if AlgorithmConfig(name=name).uses_critic} == {"ppo"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).selects_by_cov} == {"clip_cov", "kl_cov"}
    assert {name for name in PRESETS if AlgorithmConfig(name=name).uses_ref} == {
        "dpo",
        "ipo",
        "online_dpo",
    }
    assert AlgorithmConfig(kl_coef=0.1).uses_ref
