"""Which file `--recipe` means, and what a recipe file may not decide for its reader."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from skylite.cli.train_defaults import find_recipe
from skylite.config.loading import read_recipe
from skylite.errors import ConfigError
from tests.unit.bad_inputs import Reply, call

BUNDLED = Path(__file__).parents[2] / "recipes" / "gsm8k.toml"


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with recipes of the bundled names."""
    (tmp_path / "recipes").mkdir()
    for path in ("recipes/gsm8k.toml", "recipes/mine.toml", "gsm8k.toml", "gsm8k"):
        (tmp_path / path).write_text("num_steps = 7\n")
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_bare_name_is_the_bundled_recipe_in_every_folder(here: Path) -> None:
    assert find_recipe("gsm8k").read_text() == BUNDLED.read_text()


@pytest.mark.parametrize("name", ["recipes/gsm8k.toml", "./recipes/gsm8k.toml", "gsm8k.toml", "./gsm8k"])
def test_a_name_with_a_slash_or_a_suffix_is_a_path(here: Path, name: str) -> None:
    assert read_recipe(find_recipe(name)) == {"num_steps": 7}
    assert read_recipe(find_recipe(str(here / name))) == {"num_steps": 7}


def test_the_error_says_where_it_looked(here: Path) -> None:
    with pytest.raises(ConfigError, match=r"no bundled recipe 'mine' in \S+recipes.*gsm8k_cpu.*mine\.toml"):
        find_recipe("mine")
    for name in ("recipes/none.toml", "recipes/gsm8k_cpu", "none.toml", "./gsm8k_cpu"):
        with pytest.raises(ConfigError, match=rf"recipe file {name} does not exist.*bundled.*gsm8k_cpu"):
            read_recipe(find_recipe(name))


@pytest.fixture
def stranger(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder from somebody else: data, a recipe, and Python files that the recipe names."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("rows.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": "1"}) + "\n" for i in range(60)))
    columns = ["--question", "q", "--answer", "a"]
    assert call(["prepare", "rows.jsonl", *columns, "--reward", "math", "--out", "data"]).code == 0
    Path("theirs.py").write_text("open('ran', 'w')\ndef f(prompt, completion): return 1.0\n")
    return tmp_path


def dry_run(folder: Path, model: Path, *more: str) -> Reply:
    flags = ["--model", str(model), "--data", "data", "--set", "eval.limit=0"]
    return call(["train", "--recipe", "r.toml", *flags, "--dry-run", *more])


@pytest.mark.parametrize(
    ("text", "named"),
    [
        ('[reward]\nfunctions = ["theirs.py:f"]\n', "reward.functions=['theirs.py:f']"),
        ('[algorithm]\nadvantage = "theirs.py:f"\n', "algorithm.advantage=theirs.py:f"),
        ('[algorithm]\npolicy_loss = "theirs.py:f"\n', "algorithm.policy_loss=theirs.py:f"),
    ],
)
def test_a_program_that_only_a_recipe_names_does_not_run(
    stranger: Path, tiny_llama: Path, text: str, named: str
) -> None:
    (stranger / "r.toml").write_text(text)
    reply = dry_run(stranger, tiny_llama)
    assert reply.code == 2, reply.output
    assert "r.toml names the" in reply.output
    assert "--set" in reply.output
    assert not (stranger / "ran").exists()
    assert not (stranger / "state").exists(), "a refused program is not remembered"
    assert dry_run(stranger, tiny_llama, "--set", named).code == 0
    assert dry_run(stranger, tiny_llama).code == 0, "the user has named it by now"
