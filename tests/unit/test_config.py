"""All bad settings are reported at once, each with a reason. Good settings are applied."""

import json
from pathlib import Path

import pytest

from skylite.config.loading import read_run_config
from skylite.config.provenance import parse_value
from skylite.config.train import TrainConfig
from skylite.engine.vllm.memory import LORA_RANKS, served_rank
from skylite.errors import ConfigError
from tests.decisions import resolved
from tests.settings import load_config

RECIPES = sorted((Path(__file__).parents[2] / "recipes").glob("*.toml"))


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda p: p.stem)
def test_every_recipe_loads(recipe: Path) -> None:
    assert load_config(recipe, {}).num_steps >= 1


def test_the_repository_has_recipes() -> None:
    assert {"gsm8k", "gsm8k_cpu"} <= {p.stem for p in RECIPES}


def test_every_problem_is_named_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {"lora.rank": 0}, ["lora.rnk=3", "rollout.group_size=abc", "nosuch.x=1"])
    text = str(caught.value)
    assert "4 problem" in text or "5 problem" in text
    for part in ("lora.rank=0", "did you mean rank?", "rollout.group_size='abc'", "nosuch"):
        assert part in text


@pytest.mark.parametrize(
    ("setting", "names"),
    [
        ("lr=1e-5", ["optim.lr", "critic.lr"]),
        ("group_size=4", ["rollout.group_size"]),
        ("optim.lrr=1", ["lr"]),
    ],
)
def test_a_setting_without_its_section_names_where_it_is(setting: str, names: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load_config(None, {}, [setting])
    assert f"did you mean {' or '.join(names)}?" in str(caught.value)


def test_each_problem_names_who_gave_the_value(tmp_path: Path) -> None:
    recipe = tmp_path / "mine.toml"
    recipe.write_text("num_steps = 0\nlora.rank = 8\n")
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, {"lora.rank": 0}, ["seed=-1"], {"lora.rank": "--rank"})
    lines = {line.strip(" -").partition(" ")[0]: line for line in str(caught.value).splitlines()}
    assert "(--rank)" in lines["lora.rank=0"]
    assert f"(recipe {recipe})" in lines["num_steps=0"]
    assert "(--set)" in lines["seed=-1"]


@pytest.mark.parametrize(
    ("setting", "reason"),
    [
        ("lora.use_dora=true", "DoRA"),
        ('lora.bias="all"', "biases"),
        ('lora.modules_to_save=["lm_head"]', "modules_to_save"),
        ("lora.init=pissa", "PiSSA"),
        ("lora.init=olora", "base weights"),
    ],
)
def test_settings_that_vllm_cannot_serve_are_refused_with_the_reason(setting: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason):
        load_config(None, {}, [setting])


@pytest.mark.parametrize(
    ("rank", "served"), [(1, 1), (2, 8), (8, 8), (12, 16), (32, 32), (33, 64), (300, 320), (512, 512)]
)
def test_the_rank_is_rounded_up_to_one_that_vllm_allows(rank: int, served: int) -> None:
    assert served_rank(rank) == served
    assert served in LORA_RANKS


def test_a_rank_that_vllm_does_not_serve_is_refused() -> None:
    with pytest.raises(ConfigError, match="LoRA rank 513 is above 512, the largest that vLLM serves"):
        served_rank(513)


def test_groups_of_one_are_refused() -> None:
    with pytest.raises(ConfigError, match="every advantage is 0"):
        load_config(None, {"rollout.group_size": 1})


def test_mini_batches_hold_complete_groups() -> None:
    with pytest.raises(ConfigError, match="must divide"):
        load_config(None, {"algorithm.updates_per_step": 3, "rollout.prompts_per_step": 8})
    assert (
        load_config(
            None, {"algorithm.updates_per_step": 4, "rollout.prompts_per_step": 8}
        ).algorithm.updates_per_step
        == 4
    )


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("1e-4", 1e-4),
        ("true", True),
        ("none", None),
        ("abc", "abc"),
        ('["q", "v"]', ["q", "v"]),
        ('"3"', "3"),
    ],
)
def test_set_values_are_toml_and_bare_words_are_strings(text: str, value: object) -> None:
    assert parse_value(text) == value


@pytest.mark.parametrize("key", ["trainer.checkpointing", "importance.mode", "lora.bias"])
def test_none_is_a_choice_where_a_setting_has_one_of_that_name(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    (tmp_path / "r.yaml").write_text(f"{section}:\n  {name}: none\n")
    for config in (load_config(None, {}, [f"{key}=none"]), load_config(tmp_path / "r.yaml", {})):
        assert getattr(getattr(config, section), name) == "none"


@pytest.mark.parametrize("key", ["trainer.attention", "optim.lr"])
def test_none_is_refused_where_no_choice_has_that_name(tmp_path: Path, key: str) -> None:
    section, _, name = key.partition(".")
    (tmp_path / "r.yaml").write_text(f"{section}:\n  {name}: none\n")
    for recipe, settings in ((None, [f"{key}=none"]), (tmp_path / "r.yaml", [])):
        with pytest.raises(ConfigError, match=rf"{key}\b.*None"):
            load_config(recipe, {}, settings)
    assert load_config(None, {}, ["importance.reject_kl=none"]).importance.reject_kl is None


def test_a_set_without_a_value_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"--set foo sets nothing"):
        load_config(None, {}, ["seed=1", "foo"])


def test_what_is_typed_replaces_the_recipe_and_is_typed_once(tmp_path: Path) -> None:
    recipe = tmp_path / "r.toml"
    recipe.write_text("num_steps = 7\n[lora]\nrank = 4\nalpha = 8\n")
    config = load_config(recipe, {"lora.rank": 16}, ["num_steps=9"])
    assert (config.num_steps, config.lora.rank, config.lora.alpha) == (9, 16, 8)
    with pytest.raises(ConfigError, match=r"--rank and --set lora\.rank both choose lora\.rank"):
        load_config(recipe, {"lora.rank": 16}, ["lora.rank=64"], {"lora.rank": "--rank"})


@pytest.mark.parametrize("text", ["num_steps = ", "[lora\nrank=3", "\x00"])
def test_a_broken_recipe_gives_one_sentence(tmp_path: Path, text: str) -> None:
    (tmp_path / "r.toml").write_text(text)
    with pytest.raises(ConfigError, match="not valid TOML"):
        load_config(tmp_path / "r.toml", {})


def test_the_config_round_trips_through_json() -> None:
    config = load_config(None, {"lora.target_modules": ["q_proj"], "importance.reject_kl": None})
    assert TrainConfig.model_validate_json(config.model_dump_json()) == config


def test_explicit_settings_override_the_named_algorithm() -> None:
    dapo = load_config(None, {}, ["algorithm.name=dapo", "algorithm.overlong_buffer_frac=0.0"]).algorithm
    assert (dapo.clip_eps_high, dapo.zero_std_groups, dapo.overlong_buffer_frac) == (0.28, "resample", 0.0)
    ppo = load_config(None, {"rollout.group_size": 1}, ["algorithm.name=ppo"])
    assert (ppo.algorithm.advantage, ppo.rollout.group_size) == ("gae", 1)
    with pytest.raises(ConfigError, match=r"dapoo.*is not an algorithm; choose one of grpo, bnpo"):
        load_config(None, {}, ["algorithm.name=dapoo"])
    with pytest.raises(ConfigError, match=r"algorithm\.name"):
        load_config(None, {"algorithm.name": ["sft"]})
    with pytest.raises(ConfigError, match=r"leaves algorithm\.name=rloo nothing to compare"):
        load_config(None, {"rollout.group_size": 1}, ["algorithm.name=rloo"])
    with pytest.raises(ConfigError, match="maxrl divides by a group's mean reward"):
        load_config(None, {}, ["algorithm.name=maxrl", "algorithm.overlong_buffer_frac=0.2"])


def test_a_run_of_another_version_is_not_reported_as_damaged(tmp_path: Path) -> None:
    decided = resolved(Path("m"), Path("s")).model_dump(mode="json")
    tree = {"skylite_version": "0", "config": {"grpo": {"kl_coef": 0.0}}, "resolved": decided}
    (tmp_path / "config.json").write_text(json.dumps(tree))
    with pytest.raises(
        ConfigError, match=r"does not fit this skylite .*config\.grpo.*made by another version"
    ):
        read_run_config(tmp_path / "config.json")
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ConfigError, match="damaged"):
        read_run_config(tmp_path / "config.json")
