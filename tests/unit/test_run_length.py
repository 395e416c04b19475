"""Epochs become steps, exactly; steps and epochs exclude each other; both are recorded."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from skylite.config.loading import change_config, read_run_config
from skylite.config.train import TrainConfig
from skylite.data.prompt_order import prompts_for_step
from skylite.errors import ConfigError, DataError
from skylite.rollout.plan import epochs_to_steps, plan_run, write_run
from skylite.rollout.resume import plan_resume
from skylite.run.run_dir import RunDir
from tests.settings import load_config, typed
from tests.unit.bad_inputs import Reply, call, printed_json
from tests.unit.run_cases import make_model, publish_adapter_0, write_data


@pytest.mark.parametrize(
    ("epochs", "prompts", "per_step", "steps"),
    [
        (1, 7473, 32, 233),  # 233.5: an epoch drops the remainder
        (2, 7473, 32, 466),
        (0.5, 7473, 32, 117),  # 116.5, rounded up
        (0.1, 300, 10, 3),  # 0.1 * 30 is above 3 in floating point
        (0.3, 100, 10, 3),
        (0.001, 100, 10, 1),
        (1.1, 10, 1, 11),
    ],
)
def test_epochs_become_steps(epochs: float, prompts: int, per_step: int, steps: int) -> None:
    config = TrainConfig.model_validate({"num_epochs": epochs, "rollout": {"prompts_per_step": per_step}})
    computed, note = epochs_to_steps(config, prompts)
    assert (computed.num_steps, computed.num_epochs) == (steps, epochs)
    assert f"num_steps={steps}" in note
    assert f"{prompts} prompts" in note


def test_without_epochs_the_steps_stay() -> None:
    config = TrainConfig.model_validate({"num_steps": 5})
    assert epochs_to_steps(config, 1) == (config, "")


def test_too_few_prompts_for_a_step_are_refused() -> None:
    with pytest.raises(DataError, match="A step takes 8 distinct prompts, but the data set has 7"):
        epochs_to_steps(TrainConfig.model_validate({"num_epochs": 1}), 7)


def test_the_users_word_replaces_the_recipes(tmp_path: Path) -> None:
    steps, epochs, both = (tmp_path / f"{name}.toml" for name in ("steps", "epochs", "both"))
    steps.write_text("num_steps = 7")
    epochs.write_text("num_epochs = 0.5")
    both.write_text("num_steps = 7\nnum_epochs = 0.5")
    assert load_config(steps, {"num_epochs": 2.0}).num_epochs == 2.0
    changed = load_config(epochs, {}, ["num_steps=9"])
    assert (changed.num_steps, changed.num_epochs) == (9, None)
    with pytest.raises(ConfigError, match="has num_steps and num_epochs"):
        load_config(both, {"num_steps": 3})


@pytest.mark.parametrize(
    ("flags", "settings"),
    [
        ({"num_steps": 3, "num_epochs": 1.0}, []),
        ({"num_steps": 3}, ["num_epochs=1"]),
        ({}, ["num_epochs=1", "num_steps=3"]),
    ],
)
def test_both_are_an_error(flags: dict[str, Any], settings: list[str]) -> None:
    with pytest.raises(ConfigError, match=r"num_steps \(--steps\) and num_epochs \(--epochs\) both set"):
        load_config(None, flags, settings)


@pytest.mark.parametrize("epochs", ["0", "-1", "nan", "inf", "1e400"])
def test_impossible_epochs_are_refused(epochs: str) -> None:
    reply = call(["train", "--data", "none", "--epochs", epochs])
    assert reply.code == 2, reply.output
    assert "num_epochs" in reply.output
    assert "Traceback" not in reply.output


@pytest.fixture
def run(tmp_path: Path, machine: object) -> RunDir:
    """A run of half an epoch: 2 steps of the 4 that 32 prompts make."""
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 32)
    tree = {"model": {"name": str(tmp_path / "model")}, "data": {"path": str(tmp_path / "data")}}
    (tmp_path / "recipe.toml").write_text("num_epochs = 0.5")
    settings = [f"{section}.{key}={json.dumps(v)}" for section, e in tree.items() for key, v in e.items()]
    run = RunDir(tmp_path / "run")
    write_run(plan_run(load_config(tmp_path / "recipe.toml", {}, settings), run))
    publish_adapter_0(run.adapters(read_run_config(run.config_path)))
    return run


def test_the_run_records_epochs_steps_and_why(run: RunDir) -> None:
    recorded = read_run_config(run.config_path)
    assert (recorded.config.num_epochs, recorded.config.num_steps) == (0.5, 2)
    assert any(
        n.startswith("num_steps=2: num_epochs=0.5, and an epoch") for n in map(str, recorded.resolved.notes)
    )


def test_a_resume_keeps_the_length_or_takes_a_new_total(run: RunDir) -> None:
    def length(**flags: Any) -> tuple[int, float | None]:
        config = plan_resume(run, typed(flags)).config
        return config.num_steps, config.num_epochs

    assert length() == (2, 0.5)
    assert length(num_epochs=1.5) == (6, 1.5)
    assert length(num_steps=5) == (5, None)


def test_a_resume_with_both_is_refused(run: RunDir) -> None:
    with pytest.raises(ConfigError, match="both set the length"):
        change_config(read_run_config(run.config_path).config, typed({"num_steps": 3, "num_epochs": 2.0}))


def test_more_epochs_are_refused_where_the_schedule_ends_at_the_last_step(
    tmp_path: Path, run: RunDir
) -> None:
    recorded = read_run_config(run.config_path)
    tree = recorded.config.model_dump(mode="json") | {"optim": {"schedule": "linear"}}
    other = RunDir(tmp_path / "other")
    write_run(plan_run(TrainConfig.model_validate(tree), other))
    shutil.copytree(run.default_adapters, other.default_adapters, dirs_exist_ok=True)
    with pytest.raises(ConfigError, match=r"optim\.schedule=linear ends at num_steps"):
        plan_resume(other, typed({"num_epochs": 3.0}))
    assert plan_resume(other).config.num_steps == 2


def dry_run(folder: Path, **flags: object) -> Reply:
    """`skylite train --dry-run` on the data and model of `run`, with an empty recipe."""
    (folder / "empty.toml").write_text("")
    given = {"recipe": folder / "empty.toml", "data": folder / "data", "model": folder / "model"} | flags
    words = [word for name, value in given.items() for word in (f"--{name}", str(value))]
    return call(["train", *words, "--run", str(folder / "new"), "--dry-run"])


def test_a_dry_run_prints_the_computed_steps_and_a_verdict(tmp_path: Path, run: RunDir) -> None:
    reply = dry_run(tmp_path, epochs=2.5)
    assert reply.code == 0, reply.output
    settings = printed_json(reply)
    assert (settings["num_steps"], settings["num_epochs"]) == (10, 2.5)
    assert reply.output.splitlines()[-1] == (
        "skylite: ready: 10 steps, 32 prompts (8 prompts x 8 completions a step, 2.5 epochs), 0 held out; "
        "without --dry-run this command trains"
    )
    assert not (tmp_path / "new").exists()
    resumed = call(["train", "--resume", str(run.root), "--dry-run"])
    assert resumed.code == 0, resumed.output
    assert "ready: steps 1 to 2, 32 prompts" in resumed.output.splitlines()[-1]


def test_a_dry_run_refuses_too_few_prompts_in_the_words_of_the_run(tmp_path: Path, machine: object) -> None:
    make_model(tmp_path / "model")
    write_data(tmp_path / "data", 7)
    reply = dry_run(tmp_path, steps=3)
    with pytest.raises(DataError) as error:
        prompts_for_step([], 1, 8, 0)
    assert reply.code == 2, reply.output
    assert str(error.value).replace("has 0", "has 7") in reply.output
    assert "ready" not in reply.output


def test_a_dry_run_checks_the_default_data_and_keeps_none(
    tmp_path: Path, machine: object, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    reply = call(["train", "--model", str(tiny_llama), "--dry-run"])
    assert reply.code == 0, reply.output
    assert "data/gsm8k-synthetic does not exist yet: the run prepares it" in reply.output
    assert printed_json(reply)["data"]["path"] == "data/gsm8k-synthetic"
    assert "ready: 20 steps, 1024 prompts" in reply.output
    assert [str(p.relative_to(tmp_path)) for p in tmp_path.rglob("*")] == ["temporary"]
