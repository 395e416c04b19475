"""`skylite train --data FOLDER` without a recipe: sizes follow the data, and the run has its name."""

from __future__ import annotations

import json
import os
import re
from pathlib import Path
from typing import Any

import pytest

from skylite.cli.train_defaults import default_recipe, find_recipe, size_by_data
from skylite.config.rollout import RolloutConfig
from skylite.config.train import TrainConfig
from skylite.errors import DataError
from tests.prepared import prepare
from tests.settings import load_config
from tests.unit.bad_inputs import call


@pytest.fixture(autouse=True)
def in_tmp(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))


def data(rows: int = 100, question: str = "x", answer: str = "y", **flags: Any) -> Path:
    lines = [json.dumps({"question": f"{question} {i}", "answer": f"{answer} {i}"}) for i in range(rows)]
    Path("mine.jsonl").write_text("\n".join(lines))
    return prepare("mine.jsonl", **{"reward": "exact_match"} | flags)


def sized(model: Path, folder: Path, *settings: str, gpu: bool = False) -> tuple[TrainConfig, list[str]]:
    recipe = find_recipe("own_data" if gpu else "own_data_cpu")
    config = load_config(recipe, {"model.name": str(model), "data.path": str(folder)}, settings)
    config, notes = size_by_data(config, gpu=gpu)
    return config, [*map(str, notes)]


def tokens(model: Path, turns: list[dict[str, str]] | str) -> int:
    """Counted by transformers itself."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    if isinstance(turns, str):
        return len(tokenizer(turns, add_special_tokens=False).input_ids)
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    return len(tokenizer(text, add_special_tokens=False).input_ids)


def test_sizes_follow_the_data(tiny_llama: Path) -> None:
    folder = data(question="why " * 100, answer="because " * 40)
    config, notes = sized(tiny_llama, folder)
    prompt = tokens(tiny_llama, [{"role": "user", "content": "why " * 100 + " 99"}])
    answer = tokens(tiny_llama, ("because " * 40 + " 99").strip())
    assert prompt < config.rollout.max_prompt_tokens < prompt * 9 / 8 + 64
    assert config.rollout.max_prompt_tokens % 64 == 0
    assert 2 * answer <= config.rollout.max_completion_tokens < 2 * answer + 32
    assert config.num_steps == 20, "90 rows are 5 steps of 16 prompts"
    assert len(notes) == 3
    assert sized(tiny_llama, folder, gpu=True)[0].num_steps == 50


def test_short_answers_get_room_and_thoughts_get_more(tiny_llama: Path) -> None:
    assert sized(tiny_llama, data())[0].rollout.max_completion_tokens == 32
    thinks = data(reward="math", answer="")
    assert sized(tiny_llama, thinks)[0].rollout.max_completion_tokens == 128
    assert sized(tiny_llama, thinks, gpu=True)[0].rollout.max_completion_tokens == 512


def test_what_the_user_sets_stays(tiny_llama: Path) -> None:
    folder = data()
    given = ("rollout.max_prompt_tokens=77", "rollout.max_completion_tokens=9", "num_steps=3")
    config, notes = sized(tiny_llama, folder, *given)
    assert (config.rollout.max_prompt_tokens, config.rollout.max_completion_tokens) == (77, 9)
    assert (config.num_steps, notes) == (3, [])
    assert sized(tiny_llama, folder, "num_epochs=2")[0].num_epochs == 2


def test_few_rows_make_small_steps(tiny_llama: Path) -> None:
    assert sized(tiny_llama, data(rows=10))[0].rollout.prompts_per_step == 8


def test_the_recipe_depends_on_the_data() -> None:
    assert default_recipe(None).stem == "gsm8k_cpu"
    assert default_recipe(Path("data/gsm8k-synthetic")).stem == "gsm8k_cpu"
    assert default_recipe(Path("data/mine")).stem == "own_data_cpu"


def test_the_run_has_the_name_of_the_data(tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, Any] = {}

    def plan_run(config: TrainConfig, run: Any, provenance: Any, **more: Any) -> None:
        seen.update(more, run=run.root)
        raise DataError("stop here")

    monkeypatch.setattr("skylite.rollout.plan.plan_run", plan_run)
    data()
    assert call(["train", "--data", "data/mine", "--model", str(tiny_llama)]).code == 2
    assert seen["run"].name.startswith("mine-")
    assert any("rollout.max_completion_tokens=32" in note.text for note in seen["notes"]), (
        "recorded in the run"
    )


# What prepare shows and asks, and what train says about data


def test_prepare_shows_a_prompt_with_the_system_text_that_it_adds(capsys: pytest.CaptureFixture[str]) -> None:
    data(reward="math", answer="")
    shown = capsys.readouterr().out
    assert "system (in every prompt" in shown
    assert "\\boxed{}" in shown
    assert "user: x " in shown
    data(reward="math", answer="", as_json=True)
    json.loads(capsys.readouterr().out)


def test_prepare_counts_the_tokens_of_prompts(tiny_llama: Path, caplog: pytest.LogCaptureFixture) -> None:
    question = "why " * 1000
    count = tokens(tiny_llama, [{"role": "user", "content": f"{question} 0"}])
    assert count > RolloutConfig().max_prompt_tokens
    data(rows=100, question=question, model=str(tiny_llama))
    (warning,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert "100 of 100 prompts" in warning
    assert re.findall(r"max_prompt_tokens=(\d+)", warning) == [f"{count + 1}"], "two digits are two tokens"
    caplog.clear()
    data(model=str(tiny_llama))
    short = tokens(tiny_llama, [{"role": "user", "content": "x 10"}])
    assert any(message.endswith(f" {short}") for message in caplog.messages)
    assert not [r for r in caplog.records if r.levelname == "WARNING"]


def test_prepare_does_not_replace_the_data_of_another_command(monkeypatch: pytest.MonkeyPatch) -> None:
    data()
    before = Path("data/mine/train.parquet").read_bytes()
    same = ["prepare", "mine.jsonl", "--reward", "exact_match"]
    other = ["prepare", "mine.jsonl", "--reward", "exact_match", "--seed", "1"]
    assert call(same).code == 0, "the same command again"
    refused = call(other)
    assert (refused.code, "--replace" in refused.output) == (2, True)
    assert Path("data/mine/train.parquet").read_bytes() == before
    for answer, code in (("n", 2), ("", 2), ("y", 0)):
        monkeypatch.setattr("skylite.cli.prepare.is_terminal", lambda: True)
        monkeypatch.setattr("builtins.input", lambda said=answer: said)
        assert call(other).code == code
    assert call([*same, "--replace"]).code == 0
    assert Path("data/mine/train.parquet").read_bytes() == before


def test_a_flag_of_prepare_and_a_misspelt_folder(tiny_llama: Path) -> None:
    data()
    for flag in ("--system", "--few-shot"):
        refused = call(["train", flag, "x"])
        assert (refused.code, "skylite prepare" in refused.output) == (2, True)
    assert "skylite prepare" not in call(["train", "--sistem", "x"]).output
    missed = call(["train", "--data", f"data{os.sep}mien", "--dry-run"])
    assert (missed.code, "Did you mean data/mine?" in missed.output) == (2, True)
