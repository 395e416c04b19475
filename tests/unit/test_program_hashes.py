"""A Python file that the user named is trusted by its content: other content is refused, and never runs."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import py_compile
from pathlib import Path

import pytest

from skylite.algorithms import user_functions
from skylite.config.loading import read_run_config
from skylite.errors import ConfigError
from skylite.processes.private_folders import state_folder
from skylite.rollout.plan import plan_run, write_run
from skylite.rollout.resume import plan_resume
from skylite.rollout.sources import reward_pool
from skylite.rollout.trusted_programs import remember, require_named
from skylite.run.run_dir import RunDir
from skylite.user_functions import EPISODE, REWARD, FunctionKind, load_function
from tests.settings import load_config, typed
from tests.unit.bad_inputs import Reply, call
from tests.unit.data_cases import prompt

GOOD = "def f(prompt, completion): return 1.0\n"
BAD = "open('ran', 'w')\n" + GOOD


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A working folder with colons in its name, with data whose reward is own.py:f."""
    folder = tmp_path / "a:b.py:f"
    folder.mkdir()
    monkeypatch.chdir(folder)
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    Path("rows.jsonl").write_text("".join(json.dumps({"q": f"{i}?", "a": "1"}) + "\n" for i in range(60)))
    Path("own.py").write_text(GOOD)
    columns = ["--question", "q", "--answer", "a"]
    done = call(["prepare", "rows.jsonl", *columns, "--reward", "own.py:f", "--out", "data"])
    assert done.code == 0, done.output
    return folder


def dry_run(model: Path, *more: str) -> Reply:
    flags = ["--model", str(model), "--data", "data", "--set", "eval.limit=0", "--set", "data.difficulty=[]"]
    return call(["train", "--recipe", "gsm8k_cpu", *flags, "--run", "run", "--dry-run", *more])


def test_changed_content_asks_again(here: Path, tiny_llama: Path) -> None:
    assert dry_run(tiny_llama).code == 0
    (here / "own.py").write_text(BAD)
    for reply in (
        dry_run(tiny_llama),
        call(["eval", "--base", "--data", "data", "--model", str(tiny_llama)]),
    ):
        assert reply.code == 2, reply.output
        assert f"names the reward {here}/own.py:f, a Python program that has changed" in reply.output
        assert f"name it again: --set 'reward.functions=[\"{here}/own.py:f\"]'" in reply.output
        assert not (here / "ran").exists()
    assert dry_run(tiny_llama, "--set", "reward.functions=['own.py:f']").code == 0
    assert (here / "ran").exists()
    assert dry_run(tiny_llama).code == 0
    (here / "own.py").write_text(GOOD)
    assert dry_run(tiny_llama).code == 2, "the older content is no longer the one that the user named"


def test_compiled_code_beside_the_file_is_not_used(here: Path) -> None:
    """Python itself would run this .pyc, which says that its source need not be checked."""
    (here / "bad.py").write_text(BAD)
    unchecked = py_compile.PycInvalidationMode.UNCHECKED_HASH
    cached = Path(importlib.util.cache_from_source(str(here / "own.py")))
    py_compile.compile("bad.py", cfile=str(cached), dfile="own.py", invalidation_mode=unchecked)
    load_function("own.py:f", REWARD)
    assert not (here / "ran").exists()


def test_the_workers_run_the_content_that_was_checked(here: Path, tiny_llama: Path) -> None:
    """The file changes after the check and before the worker loads it."""
    config = load_config(
        None, {"model.name": str(tiny_llama), "data.path": "data"}, ["rollout.prompts_per_step=2"]
    )
    plan = plan_run(config, RunDir(here / "run"))
    pool = reward_pool(plan.scored, plan.run.logs)
    try:
        assert asyncio.run(pool.score([(prompt(), "x")]))[0].reward == 1.0
    finally:
        pool.close()
    (here / "own.py").write_text(BAD)
    with pytest.raises(ConfigError, match=r"own\.py has changed since skylite checked it"):
        reward_pool(plan.scored, plan.run.logs)
    assert not (here / "ran").exists()


def test_the_trainer_runs_the_content_that_was_checked(here: Path, tiny_llama: Path) -> None:
    (here / "mine.py").write_text(GOOD)
    settings = ["rollout.prompts_per_step=2", "algorithm.advantage=mine.py:f"]
    config = load_config(None, {"model.name": str(tiny_llama), "data.path": "data"}, settings)
    write_run(plan_run(config, RunDir(here / "run")))
    recorded = read_run_config(RunDir(here / "run").config_path)
    assert set(recorded.resolved.trust.programs) == {f"{here}/own.py:f", f"{here}/mine.py:f"}
    (here / "mine.py").write_text(BAD)
    with pytest.raises(ConfigError, match=r"mine\.py has changed since skylite checked it"):
        user_functions.load_functions(config.algorithm, recorded.resolved.trust.programs)
    with pytest.raises(ConfigError, match=r"names the advantage \S+mine.py:f, .* has changed"):
        plan_resume(RunDir(here / "run"))
    named = plan_resume(RunDir(here / "run"), typed({}, ["algorithm.advantage=mine.py:f"]))
    assert named.resolved.trust.programs != recorded.resolved.trust.programs
    assert not (here / "ran").exists()


def test_a_hash_in_a_runs_config_is_not_trusted(here: Path, tiny_llama: Path) -> None:
    """A run from elsewhere records the hash of its own program; this user has named other content."""
    config = load_config(
        None, {"model.name": str(tiny_llama), "data.path": "data"}, ["rollout.prompts_per_step=2"]
    )
    run = RunDir(here / "run")
    write_run(plan_run(config, run))
    (here / "own.py").write_text(BAD)
    tree = json.loads(run.config_path.read_text())
    tree["resolved"]["trust"]["programs"] = {f"{here}/own.py:f": "0" * 64}
    run.config_path.write_text(json.dumps(tree))
    with pytest.raises(ConfigError, match="has changed"):
        plan_resume(run)
    assert not (here / "ran").exists()


@pytest.mark.parametrize(
    ("spec", "kind", "what", "setting"),
    [
        ("reasoning-gym", REWARD, "evaluates", """'reward.functions=["reasoning-gym"]'"""),
        ("command:python a.py", EPISODE, "a command that", "'env.episode=command:python a.py'"),
        ("verifiers:wordle", EPISODE, "installed code that", "env.episode=verifiers:wordle"),
    ],
)
def test_commands_and_code_in_data_run_only_after_the_user_named_them(
    here: Path, spec: str, kind: FunctionKind, what: str, setting: str
) -> None:
    """The hint is what one types in a shell."""
    with pytest.raises(ConfigError) as caught:
        require_named([spec], kind, Path("data"))
    assert what in caught.value.what
    assert f"name it: --set {setting}." in caught.value.hint
    remember(spec)
    assert require_named([spec], kind, Path("data")) == {}


@pytest.mark.parametrize("text", ["", "[]", '{"named": ["x.py:f"]}', '{"named": {"x.py:f": 3}}', "\xff"])
def test_a_damaged_list_names_nothing(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "x.py").write_text(GOOD)
    (tmp_path / "skylite").mkdir()
    (tmp_path / "skylite" / "programs.json").write_bytes(text.encode("latin-1"))
    with pytest.raises(ConfigError):
        require_named(["x.py:f"], REWARD, Path("data"))
    remember("x.py:f")
    require_named(["x.py:f"], REWARD, Path("data"))


def test_what_is_remembered_is_in_the_users_state_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    assert state_folder() == tmp_path / "state" / "skylite"
    monkeypatch.setenv("XDG_STATE_HOME", "")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert state_folder() == tmp_path / ".local" / "state" / "skylite"
