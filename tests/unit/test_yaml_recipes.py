"""YAML recipes give the same settings as TOML, and damage is refused in one sentence."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from skylite.config.yaml_recipe import MAX_CHARACTERS, parse_yaml
from skylite.errors import ConfigError
from tests.settings import load_config
from tests.unit.bad_inputs import call

TOML = """
num_steps = 7
[lora]
rank = 8
target_modules = ["q_proj", "v_proj"]
[optim]
lr = 1e-4
schedule = "cosine"
[reward]
answer_pattern = '####\\s*(\\d+)'
[engine]
cpu_lora = "dense"
[sync]
canary_tolerance = 0.5
"""
YAML = r"""
num_steps: 7          # a comment
lora:
  rank: 8
  target_modules: [q_proj, v_proj]
optim: {lr: 1e-4, schedule: cosine}
reward:
  answer_pattern: '####\s*(\d+)'
engine:
  cpu_lora: dense
sync:
  canary_tolerance: .5
"""


@pytest.mark.parametrize("suffix", [".yaml", ".yml"])
def test_a_yaml_recipe_gives_the_settings_of_the_toml_one(tmp_path: Path, suffix: str) -> None:
    (tmp_path / "a.toml").write_text(TOML)
    (tmp_path / f"b{suffix}").write_text(YAML)
    toml = load_config(tmp_path / "a.toml", {})
    assert toml == load_config(tmp_path / f"b{suffix}", {})
    assert (toml.num_steps, toml.optim.lr, toml.lora.target_modules) == (7, 1e-4, ["q_proj", "v_proj"])


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("1e-4", 1e-4),
        ("010", 10),
        ("1:30", "1:30"),
        ("off", "off"),
        ("yes", "yes"),
        ("2026-01-01", "2026-01-01"),
        ("true", True),
        ("none", None),
        ("~", None),
        ("", None),
        ("-3", -3),
        ("3.", 3.0),
        ("'5'", "5"),
        ("all-linear", "all-linear"),
    ],
)
def test_values_are_those_of_yaml_1_2(text: str, value: object) -> None:
    found = parse_yaml(f"key: {text}")["key"]
    assert found == value
    assert type(found) is type(value)


def test_an_empty_recipe_is_one_without_settings() -> None:
    assert parse_yaml("") == parse_yaml("# nothing\n") == {}


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("a: [1", r"expected ',' or '\]', .*line 1, column 6"),
        ("a:\n  b: 1\n c: 2", r"line 3, column 2"),
        ("a: 1\nb: 2\na: 3", r"a appears twice \(at line 3, column 1\)"),
        ("- a\n- b", "it holds a list, not settings"),
        ("just words", "it holds a str, not settings"),
        ("1: 2", "the key 1 is not text"),
        ("? [x]\n: 2", "is not text"),
        ("a: 1\n---\nb: 2", "another document"),
        ("a: &x 1\nb: *x", "has an anchor"),
        ("a: *x", "has an anchor"),
        ("a: !!python/object/apply:os.system [id]", "has the tag .*os.system"),
        ("a: !!timestamp x", "has the tag"),
        ("a: \x00", "not allowed"),
        ("a: " + "9" * 5000, "an integer of thousands of digits"),
        ("a: " + "[" * 50_000, "nested more than 20 levels deep"),
        ("- " * 50_000, "nested more than 20 levels deep"),
        ("{b: " * 20_000, "nested more than 20 levels deep"),
        ("x" * (MAX_CHARACTERS + 1), "at most 100000 are read"),
    ],
    ids=lambda text: text[:24],
)
def test_damage_is_one_sentence_with_the_place(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "recipe.yaml"
    path.write_text(text)
    started = time.monotonic()
    with pytest.raises(ConfigError, match=reason) as caught:
        load_config(path, {})
    assert str(caught.value).startswith(f"The recipe {path} is not valid YAML: ")
    assert "\n" not in str(caught.value)
    assert time.monotonic() - started < 10


def test_aliases_cannot_grow_a_recipe(tmp_path: Path) -> None:
    levels = "\n".join(f"a{n + 1}: [{', '.join([f'*a{n}'] * 9)}]" for n in range(9))
    with pytest.raises(ValueError, match="anchor"):
        parse_yaml(f"a0: &a0 [x]\n{levels}")


def test_problems_of_settings_read_as_for_toml(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("lora: {rnk: 8, rank: zero}\n")
    (tmp_path / "r.toml").write_text('[lora]\nrnk = 8\nrank = "zero"\n')
    texts = []
    for name in ("r.yaml", "r.toml"):
        with pytest.raises(ConfigError) as caught:
            load_config(tmp_path / name, {})
        texts.append(str(caught.value).replace(name, "r"))
    assert texts[0] == texts[1]
    assert "did you mean rank?" in texts[0]
    assert "lora.rank='zero'" in texts[0]


def test_the_command_line_refuses_a_damaged_yaml_recipe(tmp_path: Path) -> None:
    (tmp_path / "r.yaml").write_text("a: [1")
    reply = call(["train", "--recipe", str(tmp_path / "r.yaml"), "--dry-run"])
    assert reply.code == 2
    assert "is not valid YAML" in reply.output
    assert "Traceback" not in reply.output
