"""Files from elsewhere are data: no code in them runs and no pickle is opened."""

from __future__ import annotations

import json
import os
import pickle
import re
from pathlib import Path

import pytest

from skylite.adapters.retention import clean_up
from skylite.errors import ConfigError
from skylite.rollout.plan import plan_run, write_run
from skylite.rollout.trusted_programs import remember, require_named
from skylite.run.run_dir import RunDir, published_versions
from skylite.user_functions import REWARD
from tests.engines import write_random_adapter
from tests.settings import load_config
from tests.small_run import settings
from tests.unit.bad_inputs import call

SOURCES = Path(__file__).parents[2] / "src" / "skylite"
PROGRAM = """
from pathlib import Path
Path({ran!r}).touch()
def reward(prompt, completion):
    return 1.0
"""


@pytest.fixture
def given(tmp_path: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with downloaded data whose reward is a program that the user has not passed explicitly."""
    monkeypatch.chdir(tmp_path)
    Path("rows.jsonl").write_text("".join(json.dumps({"q": f"say {i}", "a": "x"}) + "\n" for i in range(9)))
    Path("reward.py").write_text(PROGRAM.format(ran=str(tmp_path / "ran")))
    done = call(
        [
            "prepare",
            "rows.jsonl",
            "--question",
            "q",
            "--answer",
            "a",
            "--reward",
            "reward.py:reward",
            "--out",
            "data",
        ]
    )
    assert done.code == 0, done.output
    (tmp_path / "ran").unlink()
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "fresh-home"))
    return tmp_path


def train(given: Path, tiny_llama: Path, *more: str) -> list[str]:
    return [
        "train",
        "--recipe",
        "gsm8k_cpu",
        "--data",
        "data",
        "--set",
        "data.difficulty=[]",
        "--set",
        "rollout.prompts_per_step=4",
        "--model",
        str(tiny_llama),
        "--run",
        "r",
        "--dry-run",
        *more,
    ]


def test_a_reward_program_that_only_the_data_names_does_not_run(given: Path, tiny_llama: Path) -> None:
    for args in (train(given, tiny_llama), ["eval", "--base", "--data", "data", "--model", str(tiny_llama)]):
        reply = call(args)
        assert reply.code == 2, reply.output
        assert f"--set 'reward.functions=[\"{given / 'reward.py'}:reward\"]'" in reply.output
        assert not (given / "ran").exists()


def test_a_reward_program_passed_explicitly_runs_and_is_logged(given: Path, tiny_llama: Path) -> None:
    assert (
        call(train(given, tiny_llama, "--set", f"reward.functions=['{given / 'reward.py'}:reward']")).code
        == 0
    )
    assert (given / "ran").exists()
    reply = call(train(given, tiny_llama))
    assert reply.code == 0, reply.output
    assert f"the program {given / 'reward.py'}:reward runs" in reply.output


def test_every_function_of_a_list_must_be_named(given: Path, tiny_llama: Path) -> None:
    """The user names one function. The data's list names another, which must not run."""
    (given / "mine.py").write_text("def reward(prompt, completion): return 0.5")
    mine, theirs = f"{given / 'mine.py'}:reward", f"{given / 'reward.py'}:reward"
    assert call(train(given, tiny_llama, "--set", f"reward.functions=['{mine}']")).code == 0
    assert not (given / "ran").exists()
    with pytest.raises(ConfigError, match=r"names the reward \S+reward\.py:reward") as error:
        require_named([mine, theirs], REWARD, Path("run"))
    assert error.value.hint.endswith(f'--set \'reward.functions=["{mine}", "{theirs}"]\'.')
    assert call(train(given, tiny_llama, "--set", f"reward.functions=['{mine}', '{theirs}']")).code == 0
    require_named([mine, theirs], REWARD, Path("run"))


def test_an_empty_list_does_not_allow_the_datas_reward(given: Path, tiny_llama: Path) -> None:
    assert call(train(given, tiny_llama, "--set", "reward.functions=[]")).code == 2
    base = ["eval", "--base", "--data", "data", "--model", str(tiny_llama), "--set", "reward.functions=[]"]
    assert call(base).code == 2
    assert not (given / "ran").exists()


@pytest.mark.parametrize("setting", ["advantage", "policy_loss"])
def test_an_algorithm_that_only_a_run_names_does_not_run(
    setting: str, given: Path, tiny_llama: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither on resume nor in a replay. The parent process never runs it."""
    (given / "own.py").write_text(
        f"from pathlib import Path\nPath({str(given / 'ran')!r}).touch()\ndef f(a, b): ..."
    )
    named = f"algorithm.{setting}={given / 'own.py'}:f"
    config = load_config(
        None,
        {"num_steps": 1, "model.name": str(tiny_llama), "data.path": "data"},
        [named, f"reward.functions=['{given / 'reward.py'}:reward']"],
    )
    write_run(plan_run(config, RunDir(given / "run")))
    (given / "ran").unlink()  # written by the reward program
    monkeypatch.setenv("XDG_STATE_HOME", str(given / "their-home"))
    remember(f"{given / 'reward.py'}:reward")
    resume, replay = ["train", "--resume", "run", "--dry-run"], ["replay", "run", "--step", "1"]
    for args in (resume, replay):
        reply = call(args)
        assert reply.code == 2, reply.output
        assert (
            f"run/config.json names the {setting.replace('_', ' ')} {given / 'own.py'}:f, a Python"
            in reply.output
        )
        assert f"name it: --set {named}." in reply.output
    changed = call([*replay, "--set", "optim.lr=1.0"])
    assert (changed.code, "uses the run's own settings, and --set optim.lr=1.0" in changed.output) == (
        2,
        True,
    )
    named_here = call([*replay, "--set", named])
    assert "has no adapter" in named_here.output or "holds no policy-v000001" in named_here.output, (
        named_here.output
    )
    reply = call(resume)
    assert reply.code == 0, reply.output
    assert f"the program {given / 'own.py'}:f runs" in reply.output
    assert not (given / "ran").exists()


def test_allowed_programs_are_remembered_by_path_and_a_read_only_home_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "file"))
    (tmp_path / "file").write_text("in the way")
    for name in ("x.py", "y.py"):
        (tmp_path / name).write_text("def f(prompt, completion): ...")
    remember(f"{tmp_path}/x.py:f")
    with pytest.raises(ConfigError, match="not named on this machine"):
        require_named([f"{tmp_path}/x.py:f"], REWARD, Path("data"))
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "home"))
    remember(f"{tmp_path}/x.py:f")
    require_named([f"{tmp_path}/x.py:f"], REWARD, Path("data"))
    for other in (f"{tmp_path}/x.py:g", f"{tmp_path}/y.py:f", "x.py:f"):
        with pytest.raises(ConfigError):
            require_named(["gsm8k", other], REWARD, Path("data"))


def test_a_pickled_adapter_is_refused_and_not_opened(given: Path, tiny_llama: Path) -> None:
    class Trap:
        def __reduce__(self) -> tuple[object, tuple[str]]:
            return (os.mkdir, (str(given / "opened"),))

    adapter = write_random_adapter(given / "adapter", tiny_llama)
    (adapter / "adapter_model.safetensors").unlink()
    for name in ("adapter_model.bin", "adapter_model.pt", "adapter_model.safetensors"):
        (adapter / name).write_bytes(pickle.dumps(Trap()))
        reply = call(
            train(given, tiny_llama, "--set", "reward.functions=['math']", "--from-adapter", "adapter")
        )
        assert reply.code == 2, reply.output
        assert "adapter_model.safetensors" in reply.output
    assert not (given / "opened").exists()


def test_a_symlink_among_the_adapters_is_neither_served_nor_removed(tmp_path: Path) -> None:
    outside, adapters = tmp_path / "precious", tmp_path / "run" / "adapters"
    for folder in (outside, adapters / "policy-v000002", adapters):
        folder.mkdir(parents=True, exist_ok=True)
    (outside / "file").write_text("mine")
    (adapters / "policy-v000001").symlink_to(outside)
    (adapters / "policy-v000003").write_text("a file")
    assert [a.path for a in published_versions(adapters)] == [adapters / "policy-v000002"]
    clean_up(RunDir(tmp_path / "run"), adapters, 99, settings(sync={"keep_last": 2}))
    assert (outside / "file").read_text() == "mine"
    assert not (adapters / "policy-v000002").exists()


def test_no_source_file_opens_a_pickle() -> None:
    """No library function that opens a pickle is called. Models are loaded only from safetensors."""
    ways = re.compile(r"torch\.load\(|pickle\.loads?\(|joblib|np\.load\(|allow_pickle|trust_remote_code=True")
    found = [f"{p.name}: {m.group()}" for p in SOURCES.rglob("*.py") for m in ways.finditer(p.read_text())]
    assert found == []
    sources = [p.read_text() for p in (SOURCES / "model").rglob("*.py")]
    calls = [
        call
        for text in sources
        for call in re.findall(r"AutoModelForCausalLM\.from_pretrained\(([^)]*)\)", text)
    ]
    assert calls
    assert all("use_safetensors=True" in text for text in calls)
